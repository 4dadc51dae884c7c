# SPDX-License-Identifier: Apache-2.0
"""Predictions against closed forms and plain loops, for Pyro's guides and ours."""

import math
import sys

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoGuideList,
    AutoIAFNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from pyro.nn import PyroModule, PyroSample
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pyro_dvi import AtMean, MeanFieldGuide, Samples, fit, metrics, optim, predict
from pyro_dvi.errors import DataError, GuideError, UnsupportedError

GUIDES = [AutoDelta, AutoNormal, AutoDiagonalNormal, AutoMultivariateNormal, MeanFieldGuide]


def line(x, y=None):
    """Regression with two latent sites, one of them positive."""
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    noise = pyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    with pyro.plate("data", 20, subsample_size=len(x)):
        return pyro.sample("obs", dist.Normal(slope * x, noise), obs=y)


class Net(PyroModule):
    """A classifier with batch normalisation, dropout and Bayesian weights."""

    def __init__(self, num_data=20):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.drop = nn.Dropout(0.5)
        self.linear = PyroModule[nn.Linear](3, 4)
        self.linear.weight = PyroSample(dist.Normal(0.0, 1.0).expand([4, 3]).to_event(2))
        self.num_data = num_data

    def forward(self, x, y=None):
        logits = self.linear(self.drop(self.norm(x)))
        with pyro.plate("data", self.num_data, subsample_size=len(x)):
            return pyro.sample("obs", dist.Categorical(logits=logits), obs=y)


def regression(guide_class=AutoNormal):
    x = torch.linspace(-1, 1, 20)
    y = 2 * x + 0.1 * torch.randn(20)
    guide = guide_class(line)
    guide(x, y)
    return line, guide, x, y


def classification(guide_class=AutoNormal):
    x, y = torch.randn(20, 3), torch.randint(4, (20,))
    model = Net()
    guide = guide_class(model)
    guide(x, y)
    return model, guide, x, y


@pytest.mark.parametrize("guide_class", GUIDES)
def test_at_mean_is_the_model_at_the_guides_median(guide_class):
    model, guide, x, y = regression(guide_class)
    median = {name: value.detach() for name, value in guide.median().items()}
    prediction = predict(model, guide, x, AtMean())
    torch.testing.assert_close(prediction.mean, median["slope"] * x)
    torch.testing.assert_close(prediction.variance, (median["noise"] ** 2).expand(20))
    expected = dist.Normal(median["slope"] * x, median["noise"]).log_prob(y)
    torch.testing.assert_close(prediction.log_likelihood(y), expected)
    torch.testing.assert_close(predict(model, guide, (x, y), AtMean()).log_likelihood(), expected)
    torch.testing.assert_close(prediction.entropy, dist.Normal(0.0, median["noise"]).entropy().expand(20))
    rmse = float((median["slope"] * x - y).square().mean().sqrt())
    half_width = 1.959964 * median["noise"]
    inside = (median["slope"] * x - y).abs() <= half_width
    assert prediction.metrics(y) == pytest.approx(
        {
            "nll": -float(expected.mean()),
            "nll_standard_error": float(expected.std() / math.sqrt(20)),
            "rmse": rmse,
            "coverage_95": float(inside.float().mean()),
            "width_95": float(2 * half_width),
            "crps": metrics.crps_gaussian(median["slope"] * x, median["noise"].expand(20), y),
        },
        rel=1e-5,
    )


@pytest.mark.filterwarnings("ignore:.* finds no epistemic uncertainty")
@pytest.mark.parametrize("guide_class", GUIDES)
@pytest.mark.parametrize("method", [AtMean(), Samples(7)])
def test_class_probabilities_are_averages_over_the_rules_components(guide_class, method):
    model, guide, x, y = classification(guide_class)
    prediction = predict(model, guide, (x, y), method, seed=3)
    torch.testing.assert_close(prediction.probabilities.sum(-1), torch.ones(20))
    torch.testing.assert_close(prediction.mean, prediction.probabilities)
    p = prediction.probabilities
    torch.testing.assert_close(prediction.entropy, -(p * p.log()).sum(-1))
    torch.testing.assert_close(prediction.log_likelihood(), p.log()[torch.arange(20), y])
    torch.testing.assert_close(prediction.log_likelihood(y), prediction.log_likelihood())
    of_classes = {
        "accuracy",
        "brier",
        "ece",
        "aumrc",
        "entropy",
        "mutual_information",
    }
    assert set(prediction.metrics()) == {"nll", "nll_standard_error"} | of_classes


def test_samples_agree_with_a_loop_that_keeps_every_draw():
    model, guide, x, y = classification()
    prediction = predict(model, guide, (x, y), Samples(5), seed=11)
    model.eval()
    torch.manual_seed(11)
    probabilities = []
    for seed in torch.randint(2**31 - 1, (5,)).tolist():
        torch.manual_seed(seed)
        trace = poutine.trace(guide).get_trace(x)
        run = poutine.trace(poutine.replay(model, trace)).get_trace(x)
        probabilities.append(run.nodes["obs"]["fn"].probs)
    torch.testing.assert_close(prediction.probabilities, torch.stack(probabilities).mean(0))
    one_hot = torch.stack(probabilities)
    second_moment_variance = (
        one_hot.mean(0) - one_hot.mean(0) ** 2
    )  # of the one-hot code: its square is itself
    torch.testing.assert_close(prediction.variance, second_moment_variance)


def test_mixtures_of_normals_have_the_exact_moments_and_density():
    model, guide, x, y = regression()
    prediction = predict(model, guide, (x, y), Samples(50), seed=2)
    torch.manual_seed(2)
    draws = list(Samples(50).draws(guide, (x,)))
    slope = torch.stack([draw["slope"] for draw in draws])[:, None]
    noise = torch.stack([draw["noise"] for draw in draws])[:, None].expand(50, 20)
    mixture = dist.MixtureSameFamily(
        dist.Categorical(torch.ones(20, 50)), dist.Normal((slope * x).T, noise.T)
    )
    torch.testing.assert_close(prediction.mean, mixture.mean)
    torch.testing.assert_close(prediction.variance, mixture.variance)
    torch.testing.assert_close(prediction.log_likelihood(), mixture.log_prob(y))


@pytest.mark.parametrize("method", [AtMean(), Samples(6)])
def test_batch_size_loader_and_tuple_do_not_matter(method):
    model, guide, x, y = classification()
    whole = predict(model, guide, (x, y), method, seed=4)
    loader = DataLoader(TensorDataset(x, y), batch_size=7)
    forms = [
        predict(model, guide, (x, y), method, seed=4, batch_size=3),
        predict(model, guide, loader, method, seed=4),
        predict(model, guide, [(x[:5], y[:5]), (x[5:], y[5:])], method, seed=4),
        predict(model, guide, {"x": x, "y": y}, method, seed=4),
    ]
    for form in forms:
        torch.testing.assert_close(form.probabilities, whole.probabilities)
        torch.testing.assert_close(form.log_likelihood(), whole.log_likelihood())
        assert torch.equal(form.observed, y)
        assert len(form) == 20
    assert predict(model, guide, x, method, seed=4).observed is None


def test_more_rows_than_the_training_plate_has():
    model, guide, _, _ = classification()
    assert predict(model, guide, torch.randn(50, 3), Samples(2), batch_size=40).probabilities.shape == (50, 4)
    model, guide, _, _ = regression()
    assert predict(model, guide, torch.randn(33)).mean.shape == (33,)


@pytest.mark.parametrize("method", [AtMean(), Samples(3)])
def test_nothing_is_left_changed(method):
    model, guide, x, _ = classification()
    model.drop.eval()  # frozen by hand: must stay so
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    predict(model, guide, x, method, seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training and model.norm.training and not model.drop.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert torch.is_grad_enabled()
    model.eval()
    predict(model, guide, x, method)
    assert not model.training


def test_the_mode_is_restored_after_an_error():
    model, guide, x, _ = classification()
    with pytest.raises(RuntimeError):
        predict(model, guide, torch.randn(4, 9))
    assert model.training
    assert torch.nn.modules.module._global_forward_pre_hooks == {}


def test_batch_norm_inside_a_function_is_evaluated_too():
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5))

    def model(x, y=None):
        scale = pyro.sample("scale", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            return pyro.sample("obs", dist.Normal(scale * net(x).sum(-1), 1.0), obs=y)

    guide = AutoNormal(model)
    x = torch.randn(10, 3)
    guide(x, torch.zeros(10))
    batches = int(net[0].num_batches_tracked)
    first, second = predict(model, guide, x, AtMean()).mean, predict(model, guide, x, AtMean()).mean
    assert torch.equal(first, second)
    assert int(net[0].num_batches_tracked) == batches
    assert net[0].training


def test_seeds_make_draws_repeatable():
    model, guide, x, _ = classification()

    def probabilities(seed=None):
        return predict(model, guide, x, Samples(2), seed=seed).probabilities

    assert torch.equal(probabilities(1), probabilities(1))
    assert not torch.equal(probabilities(1), probabilities(2))
    assert not torch.equal(probabilities(), probabilities())
    pyro.set_rng_seed(5)
    first = probabilities()
    pyro.set_rng_seed(5)
    assert torch.equal(probabilities(), first)


def test_a_guides_own_rule_is_the_default():
    model, guide, x, _ = regression()
    guide.prediction_rule = Samples(3)
    assert predict(model, guide, x).method == Samples(3)
    assert predict(model, guide, x, AtMean()).method == AtMean()


def test_no_gradients_are_kept():
    model, guide, x, _ = classification()
    prediction = predict(model, guide, x, Samples(2))
    assert not prediction.probabilities.requires_grad
    assert not prediction.variance.requires_grad


def test_hand_written_guides():
    x = torch.linspace(-1, 1, 20)

    def independent(x, y):  # insists on an argument that predictions do not have
        pyro.sample("slope", dist.Normal(2.0, 0.1))
        pyro.sample("noise", dist.LogNormal(-1.0, 0.1))

    def dependent(x, y=None):
        slope = pyro.sample("slope", dist.MultivariateNormal(torch.full((1,), 2.0), torch.eye(1)).to_event(0))
        pyro.sample("noise", dist.Delta(slope[0].exp()))

    torch.testing.assert_close(predict(line, independent, x, AtMean()).mean, 2 * x)
    torch.testing.assert_close(
        predict(line, independent, x, AtMean()).variance, torch.full((20,), math.exp(-2.0))
    )
    torch.testing.assert_close(
        predict(line, dependent, x, AtMean()).variance, torch.full((20,), math.exp(4.0))
    )

    def infinite(x, y=None):
        pyro.sample("slope", dist.HalfCauchy(1.0))
        pyro.sample("noise", dist.Delta(torch.tensor(1.0)))

    with pytest.raises(GuideError, match=r"'slope' \(HalfCauchy\) has no mean.*Samples"):
        predict(line, infinite, x, AtMean())
    assert predict(line, infinite, x, Samples(3)).mean.shape == (20,)


def test_a_guide_may_have_members_of_its_own():
    """A mixture written by the user is no ensemble of trained posteriors."""

    class Mixed(PyroModule):
        def __init__(self):
            super().__init__()
            self.members = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])

        def forward(self, x, y=None):
            mean = sum(member.bias[0] for member in self.members)
            pyro.sample("slope", dist.Normal(mean, 1.0))

    def noisy(x, y=None):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            return pyro.sample("obs", dist.Normal(slope * x, 1.0), obs=y)

    x, guide = torch.linspace(-1, 1, 5), Mixed()
    svi = SVI(noisy, guide, optim.Adam({"lr": 0.1}), loss=Trace_ELBO())
    fit(svi, [(x, x)], 2, progress=False)
    mean = sum(member.bias.item() for member in guide.members)
    assert predict(noisy, guide, x, method=AtMean()).mean == pytest.approx((mean * x).numpy())


def test_a_guide_without_a_median_says_what_to_do():
    x = torch.linspace(-1, 1, 20)
    guide = AutoIAFNormal(line)
    guide(x, x)
    with pytest.raises(GuideError, match="AutoIAFNormal has no median.*Samples"):
        predict(line, guide, x, AtMean())
    assert predict(line, guide, x, Samples(3)).mean.shape == (20,)


def test_guides_in_a_list():
    x = torch.linspace(-1, 1, 20)
    guide = AutoGuideList(line)
    guide.append(AutoDelta(poutine.block(line, expose=["noise"])))
    guide.append(AutoNormal(poutine.block(line, expose=["slope"])))
    guide(x, x)
    assert predict(line, guide, x).mean.shape == (20,)


def test_a_model_without_latent_sites():
    net = nn.Linear(3, 2)

    def model(x, y=None):
        with pyro.plate("data", len(x)):
            return pyro.sample("obs", dist.Categorical(logits=net(x)), obs=y)

    x = torch.randn(5, 3)
    torch.testing.assert_close(predict(model, lambda x: None, x).probabilities, net(x).softmax(-1).detach())


def test_the_example_dimension_comes_first_wherever_the_plate_is():
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("time", 3, dim=-2), pyro.plate("data", len(x), dim=-1):
            return pyro.sample("obs", dist.Normal(w * x.T, 1.0), obs=y)

    x = torch.randn(5, 3)
    guide = AutoNormal(model)
    guide(x, x.T)
    prediction = predict(model, guide, x, AtMean(), batch_size=2)
    torch.testing.assert_close(prediction.mean, guide.median()["w"].detach() * x)
    assert prediction.log_likelihood(x).shape == (5, 3)
    assert prediction.metrics(x)["rmse"] >= 0


@pytest.mark.parametrize("num_rows", [1, 3, 4])
def test_a_plate_as_large_as_the_batch_is_not_taken_for_the_examples(num_rows):
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2, 3), 1.0).to_event(2))
        with pyro.plate("out", 3, dim=-2), pyro.plate("data", 5, subsample_size=len(x), dim=-1):
            return pyro.sample("obs", dist.Normal((x @ w).T, 1.0), obs=y)

    x = torch.randn(5, 2)
    guide = AutoNormal(model)
    guide(x, torch.zeros(3, 5))
    prediction = predict(model, guide, x, AtMean(), batch_size=num_rows)
    torch.testing.assert_close(prediction.mean, x @ guide.median()["w"].detach())


def test_plates_that_cannot_be_told_apart_are_refused():
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("out", 3, dim=-2), pyro.plate("data", len(x), dim=-1):
            return pyro.sample("obs", dist.Normal(w * x.T, 1.0), obs=y)

    x = torch.randn(5, 3)
    guide = AutoNormal(model)
    guide(x, x.T)
    with pytest.raises(DataError, match="subsample_size"):
        predict(model, guide, x, batch_size=3)


def test_float64():
    x = torch.linspace(-1, 1, 20, dtype=torch.float64)
    torch.set_default_dtype(torch.float64)
    guide = AutoNormal(line)
    guide(x, x)
    prediction = predict(line, guide, (x, x), Samples(3))
    assert prediction.mean.dtype == prediction.log_likelihood().dtype == torch.float64


def test_memory_does_not_grow_with_the_number_of_draws_without_end(monkeypatch):
    model, guide, x, y = regression()
    for room in (40 * 20, 40 * 20 - 1):
        monkeypatch.setattr(sys.modules["pyro_dvi.predictive.predict"], "KEPT_COMPONENTS", room)
        prediction = predict(model, guide, (x, y), Samples(40))
        (part,) = prediction._parts
        assert (
            sum(value.numel() for value in prediction._values.values()) == 100
        )  # mean, variances, density, observed
        assert (part.distribution is None) == (room < 40 * 20)
    assert "coverage_95" not in prediction.metrics()
    with pytest.raises(
        UnsupportedError, match=r"quantiles at site 'obs'.*40 distributions \(Normal\).*keep_draws=True"
    ):
        prediction.quantiles(0.5)
    with pytest.raises(UnsupportedError, match="draws of observations at site 'obs'.*to_arviz"):
        prediction.sample(5)
    assert predict(model, guide, x, Samples(40), keep_draws=True).quantiles(0.5).shape == (20,)


def test_repr_says_what_was_predicted():
    model, guide, x, _ = regression()
    assert (
        repr(predict(model, guide, x, AtMean()))
        == "Prediction(Normal site 'obs', 20 examples, method=AtMean())"
    )


def test_predictions_move_inputs_to_the_models_device(device):
    model, guide, x, y = classification()
    model, guide = model.to(device), guide.to(device)
    pyro.clear_param_store()
    prediction = predict(model, guide, (x, y), Samples(3))
    assert prediction.probabilities.device == device
    assert prediction.metrics(y)["nll"] > 0
