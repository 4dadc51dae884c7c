# SPDX-License-Identifier: Apache-2.0
"""Many draws at a time give what a loop over the draws gives, whatever the model."""

from dataclasses import dataclass

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch import nn
from torch.nn import functional as F

from pyro_dvi import MeanFieldGuide, Samples, classifier, predict, regressor, to_bayesian_
from pyro_dvi.bayesian import Heteroscedastic
from pyro_dvi.errors import DataError
from pyro_dvi.predictive import PredictionRule, components
from pyro_dvi.predictive.engine import vectorised


@dataclass(frozen=True)
class Loop(PredictionRule):
    """The draws of ``Samples``, one after the other, with every check."""

    num_samples: int
    averages_draws = True

    @property
    def num_components(self):
        return self.num_samples

    def components(self, guide, inputs, respond):
        return Samples(self.num_samples).components(guide, inputs, respond)


def mlp(outputs):
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, outputs))


class ConvNet(nn.Module):
    def __init__(self, flatten):
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.conv2, self.last = nn.Conv2d(3, 4, 3), nn.Linear(16, 5)
        self.drop, self.flatten = nn.Dropout(), flatten

    def forward(self, x):
        h = F.max_pool2d(F.relu(self.norm(self.conv1(x))), 2)
        return self.last(self.drop(self.flatten(F.max_pool2d(F.softplus(self.conv2(h)), 2))))


def conv_net(flatten):
    net = ConvNet(flatten)
    net.train()
    net(2 * torch.randn(50, 1, 12, 12) + 1)  # statistics that are not the initial ones
    return classifier(to_bayesian_(net), num_data=50)


def functional(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(3, 4), 1.0).to_event(2))
    v = pyro.sample("v", dist.Normal(torch.zeros(4), 1.0).to_event(1))
    noise = pyro.sample("noise", dist.LogNormal(-1.0, 0.3))
    with pyro.plate("data", 100, subsample_size=len(x)):
        return pyro.sample("obs", dist.StudentT(5.0, torch.tanh(x @ w) @ v, noise), obs=y)


def of_kind(likelihood):
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            return pyro.sample("obs", likelihood(x @ w), obs=y)

    return model


def plates(x, y=None):
    with pyro.plate("features", 3):
        scale = pyro.sample("scale", dist.LogNormal(0.0, 0.3))
        with pyro.plate("groups", 2, dim=-2):
            w = pyro.sample("w", dist.Normal(0.0, scale))  # [groups, features]
    with pyro.plate("times", 2, dim=-2), pyro.plate("data", len(x), dim=-1):
        return pyro.sample("obs", dist.Normal(w @ x.T, 1.0), obs=y)


def local(x, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        return pyro.sample("obs", dist.Normal(w * x[:, 0] + z, 0.5), obs=y)


def branching(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    f = x @ w
    f = f.exp() if w[0] > 0 else f  # Python looks at a value
    with pyro.plate("data", len(x)):
        return pyro.sample("obs", dist.Normal(f, 1.0), obs=y)


def noisy_input(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    f = (x + 0.3 * torch.randn_like(x)) @ w
    with pyro.plate("data", len(x)):
        return pyro.sample("obs", dist.Normal(f, 1.0), obs=y)


def functional_dropout(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        return pyro.sample("obs", dist.Bernoulli(logits=F.dropout(x, 0.5, training=True) @ w), obs=y)


def extra_latent(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        shift = pyro.sample("shift", dist.Normal(0.0, 1.0))
        return pyro.sample("obs", dist.Normal(x @ w + shift, 1.0), obs=y)


def other_way_later(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    f = x @ w + torch.bernoulli(torch.full((), 0.5)) * (w[0] > 0).item()
    with pyro.plate("data", len(x)):
        return pyro.sample("obs", dist.Normal(f, 1.0), obs=y)


X = 1.5 * torch.randn(23, 3, generator=torch.Generator().manual_seed(1))
IMAGES = torch.randn(23, 1, 12, 12, generator=torch.Generator().manual_seed(1))
WHOLE = torch.arange(23) % 2

MODELS = {
    "classifier": (lambda: classifier(to_bayesian_(mlp(4)), 50), X, WHOLE),
    "regressor": (lambda: regressor(to_bayesian_(mlp(1)), 50, 0.3), X, X[:, 0]),
    "two columns": (lambda: regressor(to_bayesian_(mlp(2)), 50, dist.LogNormal(0.0, 0.2)), X, X[:, :2]),
    "own noise": (lambda: regressor(to_bayesian_(mlp(2)), 50, Heteroscedastic()), X, X[:, 0]),
    "conv net": (lambda: conv_net(nn.Flatten()), IMAGES, WHOLE),
    "conv net with view": (lambda: conv_net(lambda h: h.view(len(h), -1)), IMAGES, WHOLE),
    "Bayesian head": (lambda: head(), IMAGES, WHOLE),
    "functional": (lambda: functional, X, X[:, 0]),
    "Bernoulli": (lambda: of_kind(lambda f: dist.Bernoulli(logits=f)), X, WHOLE.float()),
    "labels": (
        lambda: of_kind(lambda f: dist.Bernoulli(logits=torch.stack([f, -f], -1)).to_event(1)),
        X,
        torch.stack([WHOLE, 1 - WHOLE], -1).float(),
    ),
    "one-hot": (
        lambda: of_kind(lambda f: dist.OneHotCategorical(logits=torch.stack([f, -f], -1))),
        X,
        torch.stack([WHOLE, 1 - WHOLE], -1).float(),
    ),
    "Poisson": (lambda: of_kind(lambda f: dist.Poisson(f.clamp(-3, 3).exp())), X, 3.0 * WHOLE),
    "Gamma": (lambda: of_kind(lambda f: dist.Gamma(2.0, F.softplus(f) + 0.1)), X, X[:, 0].abs() + 0.1),
    "vectors": (
        lambda: of_kind(lambda f: dist.MultivariateNormal(torch.stack([f, -f], -1), torch.eye(2).to(f))),
        X,
        X[:, :2],
    ),
    "no moments": (lambda: of_kind(lambda f: dist.VonMises(f, 2.0)), X, X[:, 0]),
    "masked": (lambda: of_kind(lambda f: dist.Normal(f, 1.0).mask(WHOLE[: len(f)] > 0)), X, X[:, 0]),
    "plates": (lambda: plates, X, torch.stack([X[:, 0], X[:, 1]])),
    "local": (lambda: local, X, X[:, 0]),
    "branching": (lambda: branching, X, X[:, 0]),
    "noisy input": (lambda: noisy_input, X, X[:, 0]),
    "functional dropout": (lambda: functional_dropout, X, WHOLE.float()),
    "random for some draws": (lambda: other_way_later, X, X[:, 0]),
}
WHOLE_ONLY = ("masked", "plates", "local")
RANDOM = ("random for some draws",)


def head():
    features = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(5), nn.Flatten())
    return classifier(nn.Sequential(features, to_bayesian_(nn.Linear(12, 5))), num_data=50)


def made(name, dtype, guide_class):
    torch.set_default_dtype(dtype)
    pyro.clear_param_store()
    make, x, y = MODELS[name]
    x, y = x.to(dtype), y.to(dtype) if y.is_floating_point() else y
    torch.manual_seed(3)
    model = make()
    guide = guide_class(model)
    guide(x, y)
    with torch.no_grad():  # posteriors as wide as priors would make every draw the same for softmax
        for parameter in guide.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model, guide, x, y.T if name == "plates" else y


def check_equal(found, expected, tolerance):
    assert found.num_components == expected.num_components
    for name in ("mean", "aleatoric", "epistemic", "log_probabilities", "expected_entropy", "log_likelihood"):
        values, reference = found._values.get(name), expected._values.get(name)
        assert (values is None) == (reference is None), name
        if values is not None:
            torch.testing.assert_close(
                values, reference, rtol=10 * tolerance, atol=tolerance, equal_nan=True, msg=name
            )


@pytest.mark.every(3)
@pytest.mark.parametrize("name", [name for name in MODELS if name not in RANDOM])
@pytest.mark.parametrize("guide_class", [MeanFieldGuide, AutoNormal])
def test_same_numbers_as_the_loop(name, guide_class):
    dtype = torch.float64
    model, guide, x, y = made(name, dtype, guide_class)
    data = (x, y.T if name == "plates" else y)
    size = 100 if name in WHOLE_ONLY else 9
    if name == "plates":
        predictions = [predict(model, guide, x, rule, seed=5) for rule in (Samples(11), Loop(11))]
    else:
        predictions = [
            predict(model, guide, data, rule, seed=5, batch_size=size) for rule in (Samples(11), Loop(11))
        ]
    check_equal(*predictions, 1e-10)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["classifier", "own noise", "conv net", "functional", "Poisson"])
def test_same_numbers_in_single_precision(name):
    model, guide, x, y = made(name, torch.float32, MeanFieldGuide)
    check_equal(*[predict(model, guide, (x, y), rule, seed=5) for rule in (Samples(40), Loop(40))], 1e-6)


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_the_size_of_chunks_does_not_matter(chunk, monkeypatch):
    monkeypatch.setattr(vectorised, "MAX_CHUNK", chunk)
    model, guide, x, y = made("own noise", torch.float64, MeanFieldGuide)
    check_equal(*[predict(model, guide, (x, y), rule, seed=5) for rule in (Samples(20), Loop(20))], 1e-10)


def runs_of(name, num_samples, guide_class=MeanFieldGuide):
    """Number of runs of the model in a prediction, after the first one of a batch and the one that looks at it."""
    model, guide, x, y = made(name, torch.float32, guide_class)
    runs = []

    def counted(x, y=None):
        runs.append(1)
        return model(x, y)

    predict(counted, guide, x, Samples(num_samples), seed=0)
    return len(runs) - 2


def test_one_run_serves_many_draws_where_the_model_lets_it():
    for name in ("classifier", "regressor", "own noise", "Poisson", "Bayesian head", "vectors"):
        assert runs_of(name, 41) == 1, name
    assert runs_of("classifier", 1 + 2 * vectorised.MAX_CHUNK) == 2
    for name in ("branching", "functional"):  # whose Student's t looks at its degrees of freedom
        assert runs_of(name, 41) == 41, name  # one attempt, then one by one
    for name in ("conv net", "conv net with view", "noisy input"):
        assert runs_of(name, 41) >= 40, name


def test_a_site_that_the_guide_leaves_to_the_model_is_drawn_anew_for_every_draw():
    guide = AutoNormal(pyro.poutine.block(extra_latent, hide=["shift"]))
    guide(X, X[:, 0])
    predictions = [
        predict(extra_latent, guide, X, rule, seed=5, site="obs") for rule in (Samples(200), Loop(200))
    ]
    check_equal(*predictions, 1e-6)
    assert float(predictions[0]._values["epistemic"].min()) > 0.6  # the variance of the shift, 1, among it


@pytest.mark.slow
def test_draws_that_start_to_be_random_later_are_still_right():
    model, guide, x, y = made("random for some draws", torch.float32, AutoNormal)
    a = predict(model, guide, (x, y), Samples(300), seed=5)
    b = predict(model, guide, (x, y), Loop(300), seed=6)
    assert float((a.mean - b.mean).abs().max()) < 0.5


def test_an_impossible_value_of_a_later_draw_is_reported_as_by_the_loop():
    def model(x, y=None):
        width = pyro.sample("width", dist.LogNormal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("obs", dist.Uniform(-width, width), obs=y)

    def guide(x, y=None):
        pyro.sample("width", dist.LogNormal(0.0, 1.0))

    y = torch.full((4,), 0.2)
    for rule in (Samples(200), Loop(200)):
        with pytest.raises(DataError, match="'obs'.*outside the support of Uniform"):
            predict(model, guide, (torch.zeros(4), y), rule, seed=0)


def test_parameters_that_become_impossible_are_reported_as_by_the_loop():
    def model(x, y=None):
        scale = pyro.sample("scale", dist.Normal(1.0, 0.5))
        with pyro.plate("data", len(x)):
            pyro.sample("obs", dist.Normal(x, scale), obs=y)

    def guide(x, y=None):
        pyro.sample("scale", dist.Normal(1.0, 0.5))

    for rule in (Samples(300), Loop(300)):
        with pytest.raises(ValueError, match="scale"):
            predict(model, guide, (torch.zeros(4), torch.zeros(4)), rule, seed=0)


def test_a_guide_that_looks_at_its_inputs_is_run_for_every_batch():
    def guide(x, y=None):
        pyro.sample("w", dist.Normal(x.mean(0), 0.1).to_event(1))

    model = of_kind(lambda f: dist.Normal(f, 1.0))
    check_equal(
        *[predict(model, guide, X, rule, seed=5, batch_size=8) for rule in (Samples(9), Loop(9))], 1e-6
    )


def test_draws_serve_all_batches_unless_they_take_too_much_memory(monkeypatch):
    model, guide, x, y = made("classifier", torch.float32, AutoNormal)
    runs = []
    forward = guide.forward

    def counted(*args, **kwargs):
        runs.append(1)
        return forward(*args, **kwargs)

    monkeypatch.setattr(guide, "forward", counted)
    expected = predict(model, guide, x, Samples(20), seed=5, batch_size=6)
    assert len(runs) == 20
    monkeypatch.setattr(components, "KEPT_LATENTS", 0)
    runs.clear()
    check_equal(predict(model, guide, x, Samples(20), seed=5, batch_size=6), expected, 1e-6)
    assert len(runs) == 20 * 4


def test_a_model_without_latents_is_predicted_in_batches():
    def model(x, y=None):
        with pyro.plate("data", len(x)):
            return pyro.sample("obs", dist.Normal(x, 1.0), obs=y)

    guide, x = AutoNormal(model), torch.arange(5.0)
    guide(x, x)
    assert torch.equal(predict(model, guide, x, Samples(3), batch_size=2).mean, x)


def test_validation_and_the_random_state_are_left_as_they_were():
    model, guide, x, _ = made("own noise", torch.float32, MeanFieldGuide)
    state = torch.get_rng_state()
    predict(model, guide, x, Samples(20), seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ValueError):
        dist.Normal(0.0, -1.0)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["classifier", "conv net", "own noise", "noisy input"])
def test_same_numbers_on_an_accelerator(name, device):
    model, guide, x, y = made(name, torch.float64, MeanFieldGuide)
    if isinstance(model, nn.Module):
        model.to(device)
    guide.to(device)
    check_equal(*[predict(model, guide, (x, y), rule, seed=5) for rule in (Samples(11), Loop(11))], 1e-10)
