# SPDX-License-Identifier: Apache-2.0
"""Prior, predictions for other inputs, history, attributes, summaries of big sites, plates and names."""

import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import nn

import pyro_dvi as dvi
from pyro_dvi import AtMean, MeanFieldGuide, Samples, TaylorELBO, to_arviz
from pyro_dvi.errors import ArgumentError, DataError, DviWarning, ModelError, UnsupportedError
from pyro_dvi.training import History
from tests.analysis.arviz_export.reading import ARVIZ_1, groups, reopened, values

X = torch.linspace(-1, 1, 12)
Y = 2 * X


def model(x, y=None):
    slope = pyro.sample("slope", dist.Normal(1.0, 3.0))
    with pyro.plate("data", len(x)):
        return pyro.sample("obs", dist.Normal(slope * x, 0.5), obs=y)


def guide(x, y=None):
    pyro.sample("slope", dist.Normal(2.0, 0.1))


def test_a_summary_may_be_a_number():
    exported = to_arviz(model, guide, (X, Y), 5, max_site_size=0, summarise={"twice": lambda v: 2 * float(v)})
    assert values(exported, "posterior", "slope_twice").shape == (1, 5)


def test_a_posterior_that_depends_on_the_inputs_needs_them_all():
    def amortised(x, y=None):
        pyro.sample("slope", dist.Normal(x.mean(), 0.1))

    assert values(to_arviz(model, amortised, (X, Y), 5), "posterior", "slope").shape == (1, 5)
    message = r"draws sites \['slope'\] according to its inputs.*batch_size.*sites=\[\]"
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
    with pytest.raises(UnsupportedError, match="prior cannot be drawn.*leave out prior="):
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
    with_y = to_arviz(model, guide, (X, Y), 4, predictions=(new, new), pred_coords={"data": ["a", "b", "c"]})
    assert "log_likelihood" in groups(with_y) and values(with_y, "log_likelihood", "obs").shape == (1, 4, 12)
    assert list(with_y["predictions"]["data"].values) == ["a", "b", "c"]


# History and attributes -------------------------------------------------------------------------------------------


def trained():
    net = dvi.to_bayesian_(nn.Linear(1, 1))
    regression = dvi.regressor(net, num_data=12, noise_scale=0.5)
    posterior = MeanFieldGuide(regression)
    elbo = TaylorELBO(kl_weight=0.3)
    x, y = X[:, None], Y[:, None]
    svi = SVI(regression, posterior, pyro.optim.Adam({"lr": 0.01}), loss=elbo)
    history = dvi.fit(svi, [(x, y)], epochs=3, progress=False)
    return regression, posterior, (x, y), elbo, history


def test_the_history_is_a_group_of_its_own(tmp_path):
    regression, posterior, data, _, history = trained()
    exported = reopened(to_arviz(regression, posterior, data, 5, history=history), tmp_path)
    loss = exported["training_metadata"]["loss"]
    assert loss.dims == ("epoch",)
    np.testing.assert_array_equal(loss.values, history["loss"])
    np.testing.assert_array_equal(exported["training_metadata"]["epoch"].values, [1, 2, 3])
    assert {"kl", "lr", "posterior_scale"} <= set(exported["training_metadata"].data_vars)
    assert exported.attrs["kl_weight"] == pytest.approx(0.3)  # of the last epoch, without the objective
    assert "sample_stats" not in groups(exported)
    if not ARVIZ_1:  # which takes every group whose name has no "data" in it for draws
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ArviZ's own use of pandas
            table = to_arviz(regression, posterior, data, 5, history=history).to_dataframe()
        assert len(table) == 5 and table["draw"].tolist() == [0, 1, 2, 3, 4]


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
    with pytest.raises(DataError, match=r"draws sites \['mean'\] according to its inputs.*batch_size"):
        to_arviz(curve, posterior, (X, Y), 6, sites="mean", batch_size=6)
    with pytest.raises(ArgumentError, match="no site 'means'; close names.*'mean'"):
        to_arviz(curve, posterior, (X, Y), 6, sites="means")


def test_attributes_survive_a_file(tmp_path):
    regression, posterior, data, elbo, _ = trained()
    attributes = reopened(to_arviz(regression, posterior, data, 5, elbo=elbo, seed=7), tmp_path).attrs
    expected = {
        "seed": 7,
        "elbo": "TaylorELBO",
        "kl_weight": 0.3,
        "guide": "MeanFieldGuide",
        "method": "AtMean()",
        "inference_library": "pyro_dvi",
        "pyro_version": pyro.__version__,
        "sites_left_out": "",
    }
    assert {name: attributes[name] for name in expected} == pytest.approx(expected)
    assert attributes["created_at"].startswith("20")


def test_the_kl_weight_of_a_laplace_guide_is_its_own():
    posterior = dvi.LaplaceGuide(model)
    posterior.initialize(X, Y)
    posterior.polish([(X, Y)], progress=False)
    posterior.fit([(X, Y)])
    assert to_arviz(model, posterior, (X, Y), 3).attrs["kl_weight"] == 1.0


# Big sites --------------------------------------------------------------------------------------------------------


def test_summaries_stand_for_big_sites(recwarn):
    def wide(x, y=None):
        pyro.sample("w", dist.Normal(torch.zeros(30, 50), 2.0).to_event(2))
        model(x, y)

    def wide_guide(x, y=None):
        pyro.sample("w", dist.Normal(torch.zeros(30, 50), 0.1).to_event(2))
        guide(x, y)

    functions = {"norm": torch.norm, "rows": lambda w: w.mean(1)}
    exported = to_arviz(wide, wide_guide, (X, Y), 40, summarise=functions, prior=40, seed=0)
    assert set(exported["posterior"].data_vars) == {"slope", "w_norm", "w_rows"}
    assert exported["posterior"]["w_norm"].shape == (1, 40)
    assert exported["posterior"]["w_rows"].shape == (1, 40, 30)
    for group, scale in (
        ("posterior", 0.1),
        ("prior", 2.0),
    ):  # the norm of 1,500 values varies by two per cent
        np.testing.assert_allclose(values(exported, group, "w_norm"), scale * 1500**0.5, rtol=0.1)
    assert exported.attrs["sites_left_out"] == "w"
    assert not any(issubclass(w.category, DviWarning) for w in recwarn)
    named = to_arviz(wide, wide_guide, (X, Y), 3, sites=["slope"], summarise={"norm": torch.norm})
    assert set(named["posterior"].data_vars) == {"slope", "w_norm"}
    with pytest.raises(ArgumentError, match="summarise must map names to functions"):
        to_arviz(wide, wide_guide, (X, Y), 3, summarise=torch.norm)


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


def test_a_site_that_is_called_like_a_dimension_of_arviz_is_refused():
    def confusing(x, y=None):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            return pyro.sample("draw", dist.Normal(slope * x, 0.5), obs=y)

    with pytest.raises(ModelError, match="ArviZ calls a dimension 'draw'"):
        to_arviz(confusing, guide, (X, Y), 4)


def test_nested_inputs_are_named_by_their_path():
    def nested(parts, y=None):
        model(parts["first"] + parts["rest"][0], y)

    exported = to_arviz(nested, guide, ({"first": X, "rest": [X, X]}, Y), 3, batch_size=5)
    assert set(exported["constant_data"].data_vars) == {"parts.first", "parts.rest.0", "parts.rest.1"}
    np.testing.assert_array_equal(values(exported, "constant_data", "parts.rest.1"), X)


# Numbers ----------------------------------------------------------------------------------------------------------


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
    "coords of nothing": (
        lambda: export(coords={"date": np.arange(12)}),
        r"coords names no dimension 'date'; close names: \['data'",
    ),
    "dims of nothing": (
        lambda: export(dims={"slop": ["a"]}),
        r"dims names no variable 'slop'; close names: \['slope'\]",
    ),
    "too many dims": (lambda: export(dims={"obs": ["a", "b"]}), r"dims\['obs'\].*'obs' has 1 dimensions"),
    "dims as text": (lambda: export(dims={"obs": "time"}), r"dims\['obs'\] = 'time'"),
    "no prior draws": (lambda: export(prior=0), "prior must be a positive whole number, not 0"),
    "a list of losses": (lambda: export(history=[1.0, 0.5]), "history must be what pyro_dvi.fit returned"),
    "an empty history": (lambda: export(history=History()), "no finished epoch"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_its_remedy(mistake):
    run, message = MISTAKES[mistake]
    with pytest.raises(ArgumentError, match=message):
        run()


def test_predictions_without_examples_are_refused():
    with pytest.raises(DataError, match="no examples"):
        export(predictions=X[:0], method=AtMean())
