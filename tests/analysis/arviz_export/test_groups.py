# SPDX-License-Identifier: Apache-2.0
"""Prior, predictions for other inputs, history, attributes, summaries of big sites, plates and names."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_dvi as dvi
from pyro_dvi import AtMean, MeanFieldGuide, Samples, to_arviz
from pyro_dvi.errors import ArgumentError, DataError
from tests.analysis.arviz_export.reading import groups, reopened, values

pytestmark = pytest.mark.filterwarnings("ignore:.* scores '.*point estimate")

X = torch.linspace(-1, 1, 12)
Y = 2 * X


def model(x, y=None):
    slope = pyro.sample("slope", dist.Normal(1.0, 3.0))
    with pyro.plate("data", len(x)):
        return pyro.sample("obs", dist.Normal(slope * x, 0.5), obs=y)


def guide(x, y=None):
    pyro.sample("slope", dist.Normal(2.0, 0.1))


def test_a_posterior_that_depends_on_the_inputs_needs_them_all():
    def amortised(x, y=None):
        pyro.sample("slope", dist.Normal(x.mean(), 0.1))

    assert values(to_arviz(model, amortised, (X, Y), 5), "posterior", "slope").shape == (1, 5)
    message = r"posterior of sites \['slope'\] depends on the inputs.*batch_size.*sites=\[\]"
    with pytest.raises(DataError, match=message):
        to_arviz(model, amortised, (X, Y), 5, batch_size=6)
    assert "posterior" not in groups(to_arviz(model, amortised, (X, Y), 5, batch_size=6, sites=[]))


# Prior and predictions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [100, 5])
def test_prior_draws_and_what_they_predict(batch_size):
    exported = to_arviz(model, guide, (X, Y), 10, prior=150, batch_size=batch_size, seed=0)
    slope, obs = values(exported, "prior", "slope")[0], values(exported, "prior_predictive", "obs")[0]
    assert slope.shape == (150,) and obs.shape == (150, 12)
    # Four standard errors each, fixed seed: mean 1, sd 3; given the slope, noise of sd 0.5.
    assert abs(slope.mean() - 1) < 4 * 3 / 150**0.5
    assert abs(slope.std() / 3 - 1) < 4 / 300**0.5
    noise = obs - slope[:, None] * X.numpy()
    assert abs(noise.std() / 0.5 - 1) < 4 / (2 * 1800) ** 0.5
    assert values(exported, "posterior", "slope").shape == (1, 10)


def test_prior_of_the_chosen_sites_and_of_several_batches_of_a_network():
    net = dvi.to_bayesian_(nn.Sequential(nn.Linear(2, 30), nn.Tanh(), nn.Linear(30, 1)))
    regression = dvi.regressor(net, num_data=9, noise_scale=0.1)
    x, y = torch.randn(9, 2), torch.randn(9, 1)
    posterior = MeanFieldGuide(regression)
    posterior.initialize(x, y)
    exported = to_arviz(regression, posterior, (x, y), 4, prior=6, sites="net.2.bias", batch_size=4, seed=0)
    assert set(exported["prior"].data_vars) == {"net.2.bias"}
    whole = to_arviz(regression, posterior, (x, y), 4, prior=6, sites="net.2.bias", seed=0)
    # The same functions in every batch: noise of 0.1 aside, the two exports agree.
    difference = values(exported, "prior_predictive", "obs") - values(whole, "prior_predictive", "obs")
    assert np.abs(difference).max() < 0.1 * 2**0.5 * 5


def test_a_prior_without_draws_is_refused():
    def improper(x, y=None):
        slope = pyro.sample("slope", dist.ImproperUniform(dist.constraints.real, (), ()))
        with pyro.plate("data", len(x)):
            pyro.sample("obs", dist.Normal(slope * x, 0.5), obs=y)

    assert to_arviz(improper, guide, (X, Y), 3) is not None
    with pytest.raises(NotImplementedError):
        to_arviz(improper, guide, (X, Y), 3, prior=5)


def test_predictions_for_other_inputs_have_the_same_weights_and_other_noise(tmp_path):
    new = torch.tensor([10.0, -10.0, 10.0])
    exported = to_arviz(model, guide, (X, Y), method=Samples(150), predictions=new, batch_size=2, seed=0)
    exported = reopened(exported, tmp_path)
    slope, ahead = values(exported, "posterior", "slope")[0], values(exported, "predictions", "obs")[0]
    residuals = ahead - slope[:, None] * new.numpy()
    assert np.abs(residuals).max() < 0.5 * 5
    assert abs(np.corrcoef(residuals[:, 0], residuals[:, 2])[0, 1]) < 0.33  # four standard errors
    np.testing.assert_array_equal(values(exported, "predictions_constant_data", "x"), new)
    with_y = to_arviz(model, guide, (X, Y), 4, predictions=(new, new), coords={"data": list("abcdefghijkl")})
    assert "log_likelihood" in groups(with_y) and values(with_y, "log_likelihood", "obs").shape == (1, 4, 12)
    assert with_y["posterior_predictive"]["data"].values[0] == "a"
    assert with_y["predictions"]["obs"].shape == (1, 4, 3)  # of other inputs, without these coordinates


# Deterministic sites -------------------------------------------------------------------------------------------


def curve(x, y=None):
    slope = pyro.sample("slope", dist.Normal(1.0, 3.0))
    pyro.deterministic("twice", 2 * slope)
    with pyro.plate("data", len(x)):
        mean = pyro.deterministic("mean", slope * x, event_dim=0)
        return pyro.sample("obs", dist.Normal(mean, 0.5), obs=y)


@pytest.mark.parametrize("posterior", [guide, {"slope": torch.linspace(1, 2, 6)}], ids=["guide", "draws"])
def test_deterministic_sites_are_computed_for_every_draw_if_they_are_named(posterior):
    exported = to_arviz(curve, posterior, (X, Y), 6, sites=["slope", "twice", "mean"], prior=4, seed=0)
    for group in ("posterior", "prior"):
        slope = values(exported, group, "slope")
        np.testing.assert_allclose(values(exported, group, "twice"), 2 * slope, rtol=1e-6)
        np.testing.assert_allclose(values(exported, group, "mean"), slope[..., None] * X.numpy(), rtol=1e-6)
        assert exported[group]["mean"].dims == ("chain", "draw", "data")
    assert set(to_arviz(curve, posterior, (X, Y), 6)["posterior"].data_vars) == {"slope"}
    alone = to_arviz(curve, posterior, (X, Y), 6, sites="twice", batch_size=5)
    assert values(alone, "posterior", "twice").shape == (1, 6)
    with pytest.raises(DataError, match=r"posterior of sites \['mean'\] depends on the inputs.*batch_size"):
        to_arviz(curve, posterior, (X, Y), 6, sites="mean", batch_size=6)
    with pytest.raises(KeyError, match="means"):
        to_arviz(curve, posterior, (X, Y), 6, sites="means")


# Dimensions ----------------------------------------------------------------------------------------------------------


def grouped(x, group, y=None):
    with pyro.plate("group", 3):
        level = pyro.sample("level", dist.Normal(0.0, 1.0))
        trend = pyro.sample("trend", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        local = pyro.sample("local", dist.Normal(0.0, 1.0))
        mean = level[group] + trend[group, 0] * x + local
        return pyro.sample("obs", dist.Normal(mean[:, None].expand(-1, 2), 1.0).to_event(1), obs=y)


GROUP = torch.arange(12) % 3


@pytest.mark.every(2)
@pytest.mark.parametrize("guide_class", [MeanFieldGuide, pyro.infer.autoguide.AutoNormal])
def test_plates_are_dimensions(guide_class, tmp_path):
    posterior = guide_class(grouped)
    y = torch.zeros(12, 2)
    posterior(X, GROUP, y)
    exported = to_arviz(
        grouped,
        posterior,
        (X, GROUP, y),
        4,
        coords={"group": ["a", "b", "c"], "side": ["left", "right"]},
        dims={"obs": ["data", "side"]},
        prior=2,
    )
    exported = reopened(exported, tmp_path)
    for name in ("posterior", "prior"):
        assert exported[name]["level"].dims == ("chain", "draw", "group")
        assert exported[name]["trend"].dims == ("chain", "draw", "group", "trend_dim_1")
        assert exported[name]["local"].dims == ("chain", "draw", "data")
        assert list(exported[name]["group"].values) == ["a", "b", "c"]
    assert exported["posterior_predictive"]["obs"].dims == ("chain", "draw", "data", "side")
    assert exported["log_likelihood"]["obs"].dims == ("chain", "draw", "data")
    assert exported["observed_data"]["obs"].dims == ("data", "side")
    assert exported["constant_data"]["x"].dims == ("data",)


def test_a_plate_that_is_called_like_a_variable_names_no_dimension():
    def confusing(x, y=None):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        with pyro.plate("x", len(x)):
            return pyro.sample("obs", dist.Normal(slope * x, 0.5), obs=y)

    exported = to_arviz(confusing, guide, (X, Y), 4)
    assert exported["constant_data"]["x"].dims == ("x_dim_0",)
    assert exported["log_likelihood"]["obs"].dims == ("chain", "draw", "x")


def test_nested_inputs_are_left_out():
    def nested(x, parts, y=None):
        model(x + parts["first"], y)

    exported = to_arviz(nested, guide, (X, {"first": X}, Y), 3, batch_size=5)
    assert set(exported["constant_data"].data_vars) == {"x"}


# Numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_precisions(dtype, tmp_path):
    def precise(x, y=None):
        slope = pyro.sample("slope", dist.Normal(torch.zeros((), dtype=dtype), 1.0))
        with pyro.plate("data", len(x)):
            return pyro.sample("obs", dist.Normal(slope * x, torch.ones((), dtype=dtype)), obs=y)

    def precise_guide(x, y=None):
        pyro.sample("slope", dist.Normal(torch.ones((), dtype=dtype), torch.ones((), dtype=dtype)))

    exported = to_arviz(precise, precise_guide, (X.to(dtype), Y.to(dtype)), method=Samples(5), prior=2)
    exported = reopened(exported, tmp_path)
    expected = "float64" if dtype == torch.float64 else "float32"
    for group, name in (("posterior", "slope"), ("log_likelihood", "obs"), ("observed_data", "obs")):
        assert values(exported, group, name).dtype == expected
        assert np.isfinite(values(exported, group, name)).all()


def export(**options):
    return to_arviz(model, guide, (X, Y), **{"num_samples": 4, **options})


MISTAKES = {
    "no prior draws": (lambda: export(prior=0), "prior must be a positive whole number, not 0"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_its_remedy(mistake):
    run, message = MISTAKES[mistake]
    with pytest.raises(ArgumentError, match=message):
        run()


def test_predictions_without_examples_are_refused():
    with pytest.raises(DataError, match="no examples"):
        export(predictions=X[:0], method=AtMean())
