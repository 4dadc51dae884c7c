# SPDX-License-Identifier: Apache-2.0
"""A prepared predictor gives the numbers of ``predict``, whatever the model, and for any number of rows."""

import copy
from contextlib import suppress
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDiagonalNormal, AutoNormal
from torch import nn
from torch.nn import functional as F

import pyro_dvi as dvi
from pyro_dvi import AtMean, MeanFieldGuide, Moments, ReverseDelta, Samples, predict, predictor, to_bayesian_
from pyro_dvi.bayesian import Heteroscedastic
from pyro_dvi.core.recorder import Watch
from pyro_dvi.errors import DataError, UnsupportedError
from pyro_dvi.links import Probit

N = 9


def mlp(outputs):
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, outputs))


class LeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.norm, self.conv2 = (
            nn.Conv2d(1, 3, 3, padding=1),
            nn.BatchNorm2d(3),
            nn.Conv2d(3, 4, 3),
        )
        self.drop, self.last = nn.Dropout(), nn.Linear(16, 5)

    def forward(self, x):
        h = F.max_pool2d(F.relu(self.norm(self.conv1(x)), inplace=True), 2)
        return self.last(self.drop(F.max_pool2d(F.relu(self.conv2(h)), 2).flatten(1)))


def functional(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(3, 4), 1.0).to_event(2))
    v = pyro.sample("v", dist.Normal(torch.zeros(4), 1.0).to_event(1))
    noise = pyro.sample("noise", dist.LogNormal(-1.0, 0.3))
    with pyro.plate("data", len(x)):
        return pyro.sample("obs", dist.Normal(torch.relu(x @ w) @ v, noise), obs=y)


def several(x, y=None):
    """Labels in an event, in a part of a plate."""
    w = pyro.sample("w", dist.Normal(torch.zeros(3, 2), 1.0).to_event(2))
    with pyro.plate("data", 50, subsample_size=len(x)):
        pyro.sample("obs", dist.Bernoulli(logits=x @ w).to_event(1), obs=y)


def several_by_sign(x, y=None):
    return several(torch.where(x > 0, 1.0, -1.0), y)


def trained(model, x, y, guide=MeanFieldGuide):
    guide = guide(model)
    guide(x, y)
    return model, guide, x


def classes(dtype=torch.float32):
    x, net = torch.randn(N, 3, dtype=dtype), mlp(4).to(dtype)
    return trained(dvi.classifier(to_bayesian_(net), 50), x, torch.randint(4, (N,)))


def images():
    net = LeNet().train()
    net(2 * torch.randn(50, 1, 12, 12) + 1)  # statistics that are not the initial ones
    x = torch.randn(N, 1, 12, 12)
    return trained(dvi.classifier(to_bayesian_(net), 50).train(), x, torch.randint(5, (N,)))


def noise():
    x = torch.randn(N, 3)
    model = dvi.regressor(to_bayesian_(mlp(2)), 50, noise_scale=Heteroscedastic())
    return trained(model, x, x[:, 0])


MODELS = {
    "classes": classes,
    "classes in float64": lambda: classes(torch.float64),
    "images, with batch norm": images,
    "a function, with uncertain noise": lambda: trained(functional, torch.randn(N, 3), torch.randn(N)),
    "a guide of Pyro": lambda: trained(functional, torch.randn(N, 3), torch.randn(N), AutoNormal),
    "several labels": lambda: trained(several, torch.randn(N, 3), torch.ones(N, 2)),
    "noise that depends on inputs": noise,
}
METHODS = [AtMean(), Moments(), Samples(5), Samples(1)]


@pytest.fixture(params=MODELS)
def case(request):
    pyro.set_rng_seed(0)
    return MODELS[request.param]()


def numbers(prediction):
    found = {"mean": prediction.mean, "variance": prediction.variance}
    with suppress(UnsupportedError):  # where noise and posterior are one
        found["epistemic"] = prediction.epistemic
    return found


def check(prepared, model, guide, x, method):
    expected = numbers(predict(model, guide, x, method, seed=3))
    found = {name: value for name, value in prepared(x)._asdict().items() if value is not None}
    torch.testing.assert_close(found, expected)


@pytest.mark.every(4)
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_numbers_are_those_of_predict(case, method):
    model, guide, x = case
    prepared = predictor(model, guide, x, method, seed=3)
    assert prepared.method == method and prepared.site == "obs"
    for inputs in (x[:1], torch.cat([x, -2 * x, x + 1])):
        check(prepared, model, guide, inputs, method)


def test_options_of_moments():
    method = Moments(link=Probit())
    pyro.set_rng_seed(0)
    model, guide, x = classes()
    check(predictor(model, guide, x, method, seed=3), model, guide, 2 * x, method)


def test_rules_that_compute_in_blocks():
    pyro.set_rng_seed(0)
    net = nn.Sequential(
        nn.Linear(3, 20_000), nn.Tanh(), nn.Linear(20_000, 2)
    )  # more than a block of elements
    model, guide, x = trained(
        dvi.classifier(to_bayesian_(net), 50), torch.randn(N, 3), torch.randint(2, (N,))
    )
    check(predictor(model, guide, x, Moments(link=Probit())), model, guide, x, Moments(link=Probit()))


def test_dependent_posterior_and_default_rule():
    pyro.set_rng_seed(0)
    model, guide, x = trained(functional, torch.randn(N, 3), torch.randn(N), AutoDiagonalNormal)
    check(predictor(model, guide, x, seed=3), model, guide, x[:4], Samples(30))


@pytest.mark.parametrize(("df", "method"), [(5.0, AtMean()), (5.0, Samples(4)), (0.5, AtMean())], ids=str)
def test_distributions_that_write_nan_where_they_have_no_moments(df, method):
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("obs", dist.StudentT(df, x @ w, 1.0), obs=y)

    pyro.set_rng_seed(0)
    model, guide, x = trained(model, torch.randn(N, 3), torch.randn(N))
    found = predictor(model, guide, x, method, seed=3)(2 * x)
    expected = predict(model, guide, 2 * x, method, seed=3)
    torch.testing.assert_close(found.mean, expected.mean, equal_nan=True)
    torch.testing.assert_close(found.variance, expected.variance, equal_nan=True)


def test_several_inputs_and_sites():
    def model(x, group, y=None, z=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(3, 4), 1.0).to_event(2))
        with pyro.plate("data", len(x)):
            mean = (x * w.T[group]).sum(-1)
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)
            pyro.sample("z", dist.Poisson(mean.exp()), obs=z)

    pyro.set_rng_seed(0)
    x, group = torch.randn(N, 3), torch.randint(4, (N,))
    guide = MeanFieldGuide(model)
    guide(x, group, x[:, 0], torch.ones(N))
    prepared = predictor(model, guide, (x, group), Moments(), site="z")
    expected = predict(model, guide, (x[:2], group[:2]), Moments(), site="z")
    torch.testing.assert_close(prepared(x[:2], group[:2]).variance, expected.variance)
    with pytest.raises(DataError, match="rows"):
        prepared(x, group[:2])
    with pytest.raises(DataError, match="rows of shapes"):
        prepared(x[:, :2], group)


def test_operators_are_those_of_the_network_and_few_more():
    class Counted(Watch):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += 1
            return func(*args, **(kwargs or {}))

    pyro.set_rng_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
    plain = copy.deepcopy(net)
    model, guide, x = trained(
        dvi.classifier(to_bayesian_(net), 50), torch.randn(N, 3), torch.randint(4, (N,))
    )
    counts = []
    for run in (
        plain,
        predictor(model, guide, x, AtMean()),
        predictor(model, guide, x, Moments(link=Probit())),
    ):
        with torch.no_grad(), Counted() as counted:
            run(x)
        counts.append(counted.count)
    assert counts[0] == 8  # with a transpose in each layer
    assert counts[1] <= 34  # nine of them look for NaN
    assert counts[2] <= 80  # predict: about 270


@pytest.mark.every(2)
@pytest.mark.parametrize("method", [Samples(2), Moments()], ids=str)
def test_is_a_module(method, tmp_path):
    pyro.set_rng_seed(0)
    model, guide, x = images()
    prepared = predictor(model, guide, x, method, seed=3)
    expected = prepared(x)

    def same(other):
        torch.testing.assert_close(other(x), expected, rtol=0, atol=0)

    same(copy.deepcopy(prepared))
    torch.save(prepared, tmp_path / "predictor.pt")
    same(torch.load(tmp_path / "predictor.pt", weights_only=False))
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter.add_(1.0)
    same(prepared)  # later training is another matter
    other = predictor(model, guide, x, method, seed=3)
    assert not torch.allclose(other(x).mean, expected.mean)
    other.load_state_dict(prepared.state_dict())
    same(other)
    exported = torch.export.export(
        prepared, (x,), dynamic_shapes=[({0: torch.export.Dim("rows")},)], strict=False
    )
    torch.export.save(exported, tmp_path / "program.pt2")
    program = torch.export.load(tmp_path / "program.pt2").module()
    served = program(x[:3])
    assert type(served) is tuple  # a class of this library would have to be there to load it
    torch.testing.assert_close(served, tuple(filter(torch.is_tensor, prepared(x[:3]))))
    wide = prepared.to(torch.float64)(x.double()).mean
    assert wide.dtype == torch.float64
    torch.testing.assert_close(wide.float(), expected.mean)


def by_sign(w, x):
    return torch.where(x > 0, 1.0, -1.0) @ w  # makes a number of NaN


def by_tanh(w, x):
    return x.tanh() @ w


@pytest.mark.parametrize("method", [AtMean(), Samples(2)], ids=str)
@pytest.mark.parametrize(
    ("function", "value"), [(by_sign, torch.nan), (by_tanh, torch.nan), (lambda w, x: x @ w, torch.inf)]
)
def test_values_that_predict_refuses_are_refused(function, value, method):
    pyro.set_rng_seed(0)
    model, guide, x = trained(with_mean(function), torch.randn(N, 3), torch.randn(N))
    prepared = predictor(model, guide, x, method)
    x[2, 1] = value
    with pytest.raises(DataError, match=r"NaN or infinite values: argument 1 \(1 of 27 elements\)"):
        prepared(x)
    torch.testing.assert_close(prepared(x[:2]).mean, prepared(x[[0, 1, 3]]).mean[:2])


@pytest.mark.every(2)
@pytest.mark.parametrize("way", ["export", "compile"])
def test_compiled_nan_gives_nan_in_its_row(way):
    pyro.set_rng_seed(0)
    x = torch.randn(N, 3)
    model, guide, _ = trained(several_by_sign, x, torch.ones(N, 2))
    prepared = predictor(model, guide, x, AtMean())
    expected, rows = prepared(x).mean, torch.export.Dim("rows")
    program: Any
    if way == "export":
        program = torch.export.export(prepared, (x,), dynamic_shapes=[({0: rows},)], strict=False).module()
    else:
        program = torch.compile(prepared, backend="eager", fullgraph=True)
    bad = x.clone()
    bad[2, 1] = torch.nan
    torch.testing.assert_close(program(x)[0], expected)
    found = program(bad)[0]
    assert found[2].isnan().all()
    torch.testing.assert_close(found[[0, 1, 3, 4, 5, 6, 7, 8]], expected[[0, 1, 3, 4, 5, 6, 7, 8]])


def test_infinite_values_that_have_a_prediction_are_served():
    pyro.set_rng_seed(0)
    model, guide, x = trained(with_mean(by_tanh), torch.randn(N, 3), torch.randn(N))
    x[2, 1] = -torch.inf
    check(predictor(model, guide, x[:2], AtMean()), model, guide, x, AtMean())


def test_inputs_that_require_gradients_are_served():
    pyro.set_rng_seed(0)
    model, guide, x = classes()
    assert not predictor(model, guide, x, Moments())(x.clone().requires_grad_()).mean.requires_grad


# What cannot be prepared -------------------------------------------------------------------------------------------


def refused(model, x, y, method, match):
    guide = MeanFieldGuide(model)
    guide(x, y)
    predict(model, guide, x, method)  # works
    with pytest.raises(UnsupportedError, match=match):
        predictor(model, guide, x, method)


def with_mean(function):
    """A model of a function of weights and inputs."""

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("obs", dist.Normal(function(w, x), 1.0), obs=y)

    return model


def by_value(w, x):
    return x @ w if x.sum() > 0 else -x @ w


def by_rows(w, x):
    return x @ w if len(x) % 2 else (x @ w).exp()


def by_square(w, x):
    return x @ w + torch.ones(len(x) ** 2).sum()


def by_number(w, x):
    return x @ w * (1 / len(x))


def by_list(w, x):
    return x @ w + torch.tensor(list(range(len(x))))


def by_noise(w, x):
    return x @ w + torch.randn(len(x))


TOTAL = torch.zeros(3)


def with_memory(w, x):
    return x @ w + TOTAL.copy_(x.mean(0)).sum()


def through_numpy(w, x):
    return x @ w + torch.from_numpy(x.numpy().sum(1))


def by_largest(w, x):
    return x @ w / float(x.numpy().max())


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (by_value, "Python reads a value in test_predictor.py, line [0-9]+: return x @ w if"),
        (by_rows, "operators depend on the number of rows"),
        (by_square, "that are not linear in the number of rows"),
        (by_number, "that are not linear in the number of rows"),
        (by_list, "a tensor that is created in Python"),
        (by_noise, "random numbers"),
        (with_memory, "changes a stored tensor"),
        (through_numpy, "a tensor that is created in Python"),
        (by_largest, "that are not linear in the number of rows"),
    ],
)
def test_models_that_torch_operators_do_not_tell(function, match):
    pyro.set_rng_seed(0)
    refused(with_mean(function), torch.randn(N, 3), torch.randn(N), AtMean(), match + ".*Use predict")


def test_noise_of_the_model_and_draws():
    pyro.set_rng_seed(0)
    refused(with_mean(by_noise), torch.randn(N, 3), torch.randn(N), Samples(3), "the model is random")


def test_propagation_that_looks_at_values():
    pyro.set_rng_seed(0)
    x, method = torch.randn(N, 3), Moments(propagation=ReverseDelta())
    refused(
        dvi.regressor(to_bayesian_(mlp(1)), 50, noise_scale=1.0), x, x[:, 0], method, "Python reads a value"
    )


def test_distribution_without_a_mean():
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            share = dist.TransformedDistribution(dist.Normal(x @ w, 1.0), dist.transforms.SigmoidTransform())
            pyro.sample("obs", share, obs=y)

    pyro.set_rng_seed(0)
    refused(model, torch.randn(N, 3), torch.full((N,), 0.5), AtMean(), "no mean")


def test_draws_that_depend_on_the_inputs():
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("obs", dist.Normal(x @ w, 1.0), obs=y)

    def guide(x, y=None):
        pyro.sample("w", dist.Normal(x.mean(0), 1.0).to_event(1))

    pyro.set_rng_seed(0)
    x = torch.randn(N, 3)
    with pytest.raises(UnsupportedError, match="may depend on the inputs"):
        predictor(model, guide, x, Samples(3))
    prepared = predictor(model, guide, x, AtMean())  # the mean is recorded with the rest
    expected = predict(model, guide, x[:4], AtMean())
    torch.testing.assert_close(prepared(x[:4]).mean, expected.mean)


def test_nested_inputs():
    """Their tensors are passed one after the other, and the rest stays as in the example."""

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(x["a"])):
            pyro.sample("obs", dist.Normal(x["factor"] * (x["a"] @ w) + x["b"][0], 1.0), obs=y)

    pyro.set_rng_seed(0)
    guide, x = MeanFieldGuide(model), {"factor": 2.0, "a": torch.randn(N, 3), "b": (torch.randn(N),)}
    guide(x, torch.randn(N))
    prepared = predictor(model, guide, (x,), AtMean())
    torch.testing.assert_close(prepared(x["a"], x["b"][0]).mean, predict(model, guide, (x,), AtMean()).mean)
    other = {**x, "a": torch.randn(7, 3), "b": (torch.randn(7),)}
    expected = predict(model, guide, (other,), AtMean()).mean
    torch.testing.assert_close(prepared(other["a"], other["b"][0]).mean, expected)


@pytest.mark.parametrize("method", [AtMean(), Samples(3)])
def test_a_transformer_encoder_with_a_padding_mask_is_prepared(method):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder, head = dvi.to_bayesian_(nn.TransformerEncoder(layer, 1)), nn.Linear(8, 1)

    def model(x, padding, y=None):
        f = head(encoder(x, src_key_padding_mask=padding)[:, 0]).squeeze(-1)
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(f, 0.1), obs=y)

    x, padding = torch.randn(6, 4, 8), torch.zeros(6, 4, dtype=torch.bool)
    padding[::2, 3] = True
    guide = dvi.MeanFieldGuide(model)
    guide(x, padding, torch.zeros(6))
    serve = dvi.predictor(model, guide, (x, padding), method, seed=0)
    assert torch.backends.mha.get_fastpath_enabled()
    x[padding] = 100.0  # padded positions do not matter
    expected = dvi.predict(model, guide, (x, padding), method, seed=0).mean
    torch.testing.assert_close(serve(x, padding).mean, expected, rtol=1e-4, atol=1e-4)
