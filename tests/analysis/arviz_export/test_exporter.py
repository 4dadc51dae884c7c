# SPDX-License-Identifier: Apache-2.0
"""The ArviZ export on whichever major version is installed: CI runs 0.x and 1.x."""

import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoDiagonalNormal, AutoMultivariateNormal, AutoNormal
from pyro.nn import PyroModule, PyroSample
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pyro_dvi import (
    AtMean,
    LaplaceGuide,
    MeanFieldGuide,
    Samples,
    predict,
    to_arviz,
    to_bayesian_,
)
from pyro_dvi.errors import ArgumentError, DataError, DviWarning, GuideError, ModelError
from tests.analysis.arviz_export.reading import ARVIZ_1, az, groups, reopened, values

pytestmark = pytest.mark.filterwarnings("ignore:.* scores '.*point estimate")


def line(x, y=None):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    noise = pyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    with pyro.plate("data", len(x)):
        return pyro.sample("obs", dist.Normal(slope * x, noise), obs=y)


def data(n=30):
    x = torch.linspace(-1, 1, n)
    return x, 2 * x + 0.3 * torch.randn(n)


def fitted(guide_class=AutoNormal, steps=1):
    x, y = data()
    guide = guide_class(line)
    svi = SVI(line, guide, pyro.optim.Adam({"lr": 0.05}), loss=Trace_ELBO())
    for _ in range(steps):
        svi.step(x, y)
    return guide, x, y


class Net(PyroModule):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.linear = PyroModule[nn.Linear](3, 400)
        self.linear.weight = PyroSample(dist.Normal(0.0, 0.1).expand([400, 3]).to_event(2))
        self.linear.bias = PyroSample(dist.Normal(0.0, 0.1).expand([400]).to_event(1))

    def forward(self, x, y=None):
        logits = self.linear(self.norm(x))
        with pyro.plate("data", 30, subsample_size=len(x)):
            return pyro.sample("label", dist.Categorical(logits=logits), obs=y)


@pytest.mark.parametrize(
    "guide_class", [AutoDelta, AutoNormal, AutoDiagonalNormal, AutoMultivariateNormal, MeanFieldGuide]
)
@pytest.mark.parametrize("method", [AtMean(), Samples(40)])
def test_groups_and_dimensions(guide_class, method):
    guide, x, y = fitted(guide_class)
    given = None if guide_class is AutoNormal or method != AtMean() else 30
    posterior = to_arviz(line, guide, (x, y), given, method=method, seed=0)
    assert groups(posterior) == {
        "posterior",
        "posterior_predictive",
        "observed_data",
        "constant_data",
        "log_likelihood",
    }
    draws = given or (500 if method == AtMean() else 40)  # the defaults
    assert set(posterior["posterior"].data_vars) == {"slope", "noise"}
    assert values(posterior, "posterior", "slope").shape == (1, draws)
    assert (values(posterior, "posterior", "noise") > 0).all()  # constrained space
    for group in groups(posterior) & {"posterior_predictive", "log_likelihood"}:
        assert dict(posterior[group]["obs"].sizes) == {"chain": 1, "draw": draws, "data": 30}
    np.testing.assert_array_equal(values(posterior, "observed_data", "obs"), y)
    np.testing.assert_array_equal(values(posterior, "constant_data", "x"), x)


def test_posterior_draws_have_the_guides_moments():
    guide, x, y = fitted(steps=50)
    posterior = to_arviz(line, guide, (x, y), num_samples=400, seed=0)
    loc, scale = guide.locs.slope.item(), guide.scales.slope.item()
    draws = values(posterior, "posterior", "slope")
    # Fails for one seed in 30,000; the seed is fixed.
    assert abs(draws.mean() - loc) < 4 * scale / 400**0.5
    assert abs(draws.std() / scale - 1) < 4 / 800**0.5


def test_log_likelihood_is_that_of_the_prediction():
    guide, x, y = fitted(steps=50)
    sampled = to_arviz(line, guide, (x, y), method=Samples(50), seed=3)
    mixture = np.log(np.exp(values(sampled, "log_likelihood", "obs").astype(float)).mean((0, 1)))
    expected = predict(line, guide, (x, y), Samples(50), seed=3).log_likelihood()
    np.testing.assert_allclose(mixture, expected, rtol=1e-4)
    slope, noise = (values(sampled, "posterior", name)[0, 7].item() for name in ("slope", "noise"))
    by_hand = dist.Normal(slope * x, noise).log_prob(y)
    np.testing.assert_allclose(values(sampled, "log_likelihood", "obs")[0, 7], by_hand, rtol=1e-4)


def test_predictive_draws_have_the_predictions_moments_at_the_mean_and_sampled():
    guide, x, y = fitted(steps=50)
    for method, draws in ((AtMean(), 800), (Samples(800), None)):
        posterior = to_arviz(line, guide, (x, y), draws, method=method, seed=1)
        predictive = values(posterior, "posterior_predictive", "obs")[0]
        prediction = predict(line, guide, x, method, seed=1)
        error = (predictive.mean(0) - prediction.mean.numpy()) / (prediction.variance.numpy() / 800) ** 0.5
        assert np.abs(error).max() < 5  # 30 z-scores at each of two methods; fails for one seed in 30,000
        np.testing.assert_allclose(predictive.var(0), prediction.variance, rtol=0.3)  # six standard errors


def test_batches_share_the_weights_and_not_the_noise():
    guide, x, y = fitted()
    x, y = torch.zeros(20), torch.zeros(20)
    posterior = to_arviz(line, guide, (x, y), 50, batch_size=10, seed=0)
    predictive = values(posterior, "posterior_predictive", "obs")[0]
    assert not np.isclose(predictive[:, :10], predictive[:, 10:]).any()
    whole = to_arviz(line, guide, (x, y), 50, seed=0)
    np.testing.assert_array_equal(
        values(posterior, "posterior", "slope"), values(whole, "posterior", "slope")
    )


@pytest.mark.parametrize("engine", ["h5netcdf", None])
def test_netcdf_round_trip(tmp_path, engine):
    guide, x, y = fitted()
    posterior = to_arviz(line, guide, (x, y), 20, method=AtMean(), seed=0)
    path = tmp_path / "posterior.nc"
    if engine is None:
        posterior.to_netcdf(path)
    else:
        posterior.to_netcdf(path, engine=engine)
    again = az.from_netcdf(path)
    assert groups(again) == groups(posterior)
    for group in groups(posterior):
        for name in posterior[group].data_vars:
            np.testing.assert_array_equal(again[group][name], posterior[group][name])
    assert again.attrs["method"] == "AtMean()"
    assert again.attrs["guide"] == "AutoNormal"
    assert again.attrs["seed"] == 0
    assert again.attrs["inference_library"] == "pyro_dvi"
    assert "created_at" in again["posterior"].attrs


def test_the_seed_that_was_used_is_recorded():
    guide, x, y = fitted()
    plain = to_arviz(line, guide, (x, y), 2)
    again = to_arviz(line, guide, (x, y), 2, seed=plain.attrs["seed"])
    np.testing.assert_array_equal(values(plain, "posterior", "slope"), values(again, "posterior", "slope"))


def test_leave_one_out_needs_draws_that_differ():
    guide, x, y = fitted(steps=100)
    sampled = to_arviz(line, guide, (x, y), method=Samples(200), seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a Pareto k above its limit, as may be
        loo = az.loo(sampled, pointwise=True)
    total = loo.elpd if ARVIZ_1 else loo.elpd_loo
    assert total < float(predict(line, guide, (x, y), Samples(200), seed=0).log_likelihood().sum())
    with pytest.warns(DviWarning, match="a point estimate.*only the training log-likelihood") as caught:
        at_mean = to_arviz(line, guide, (x, y), 200, method=AtMean(), seed=0)
    assert len(caught) == 1
    expected = predict(line, guide, (x, y), AtMean()).log_likelihood().detach()
    for scored in values(at_mean, "log_likelihood", "obs")[0]:
        np.testing.assert_allclose(scored, expected, rtol=1e-5)


def test_arviz_summarises_and_compares_the_export():
    guide, x, y = fitted(steps=100)
    posterior = to_arviz(line, guide, (x, y), method=Samples(200), seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one chain has no r-hat: ArviZ's own remarks
        summary = az.summary(posterior, var_names=["slope", "noise"])
        table = az.compare({"a": posterior, "b": to_arviz(line, guide, (x, y), method=Samples(200), seed=1)})
    assert list(summary.index) == ["slope", "noise"]
    assert len(table) == 2


def test_coordinates_and_dimensions_of_the_user():
    guide, x, y = fitted()
    posterior = to_arviz(
        line, guide, (x, y), 5, dims={"obs": ["time"], "x": ["time"]}, coords={"time": np.arange(100, 130)}
    )
    for group in ("posterior_predictive", "log_likelihood", "observed_data"):
        assert posterior[group]["obs"].dims[-1] == "time"
        assert posterior[group]["time"].values[0] == 100


def test_without_observations():
    guide, x, _ = fitted()
    assert groups(to_arviz(line, guide, x, 5)) == {"posterior", "posterior_predictive", "constant_data"}


def test_big_sites_are_left_out_and_named():
    x, y = torch.randn(30, 3), torch.randint(400, (30,))
    model = Net()
    guide = MeanFieldGuide(model)
    guide.initialize(x, y)
    with pytest.warns(DviWarning, match=r"sites=\[...\]\): 'linear.weight' \(1,200\)"):
        posterior = to_arviz(model, guide, (x, y), 5)
    assert list(posterior["posterior"].data_vars) == ["linear.bias"]
    assert posterior.attrs["sites_left_out"] == "linear.weight"
    for options in ({"sites": "linear.weight"}, {"sites": ["linear.weight"]}):
        posterior = to_arviz(model, guide, (x, y), 5, **options)
        assert values(posterior, "posterior", "linear.weight").shape == (1, 5, 400, 3)
        assert posterior.attrs["sites_left_out"] == "linear.bias"
    everything = to_arviz(model, guide, (x, y), 5, max_site_size=10_000)
    assert set(everything["posterior"].data_vars) == {"linear.weight", "linear.bias"}
    assert model.training and int(model.norm.num_batches_tracked) == 0


def test_classes_loaders_and_files(tmp_path):
    x, y = torch.randn(30, 3), torch.randint(400, (30,))
    model = Net()
    guide = AutoNormal(model)
    guide(x, y)
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    posterior = reopened(
        to_arviz(model, guide, loader, method=Samples(6), sites="linear.bias", seed=0), tmp_path
    )
    np.testing.assert_array_equal(values(posterior, "observed_data", "label"), y)
    assert values(posterior, "posterior_predictive", "label").dtype.kind == "i"
    whole = to_arviz(model, guide, (x, y), method=Samples(6), sites="linear.bias", seed=0)
    np.testing.assert_allclose(
        values(posterior, "log_likelihood", "label"), values(whole, "log_likelihood", "label"), rtol=1e-5
    )


def test_events_have_a_pointwise_likelihood(tmp_path):
    def model(x, y=None):
        w = pyro.sample("scope/w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            return pyro.sample("obs", dist.Normal(w * x[:, None].expand(-1, 2), 1.0).to_event(1), obs=y)

    x = torch.randn(7)
    guide = AutoNormal(model)
    guide(x, torch.zeros(7, 2))
    posterior = reopened(to_arviz(model, guide, (x, torch.zeros(7, 2)), 4), tmp_path)
    assert values(posterior, "log_likelihood", "obs").shape == (1, 4, 7)
    assert values(posterior, "posterior_predictive", "obs").shape == (1, 4, 7, 2)
    assert list(posterior["posterior"].data_vars) == ["scope.w"]


def test_inputs_that_are_too_big_to_copy(monkeypatch):
    guide, x, y = fitted()
    monkeypatch.setattr("pyro_dvi.analysis.arviz_export.draws.MAX_INPUT_VALUES", 10)
    posterior = to_arviz(line, guide, (x, y), 5)
    assert "constant_data" not in groups(posterior)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_precision_is_kept(dtype):
    torch.set_default_dtype(dtype)
    guide, x, y = fitted()
    posterior = to_arviz(line, guide, (x, y), 5)
    assert values(posterior, "posterior", "slope").dtype == str(dtype).removeprefix("torch.")


def test_seeds_repeat_and_leave_the_global_state_alone():
    guide, x, y = fitted()
    state = torch.get_rng_state()
    first, second = (to_arviz(line, guide, (x, y), 10, seed=4) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    for group, name in (("posterior", "slope"), ("posterior_predictive", "obs")):
        np.testing.assert_array_equal(values(first, group, name), values(second, group, name))
    assert not np.array_equal(
        values(first, "posterior", "slope"), values(to_arviz(line, guide, (x, y), 10), "posterior", "slope")
    )


def test_latents_of_single_examples():
    def model(x, y=None):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            return pyro.sample("obs", dist.Normal(z + x, 1.0), obs=y)

    def amortised(x, y=None):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(x, 0.1))

    x = torch.randn(8)
    posterior = to_arviz(model, amortised, (x, x), 5)
    assert values(posterior, "posterior", "z").shape == (1, 5, 8)
    with pytest.raises(DataError, match=r"'z' has one value per example.*batch_size"):
        to_arviz(model, amortised, (x, x), 5, batch_size=4)
    with pytest.raises(DataError, match="batch_size"):  # their predictions would be wrong too
        to_arviz(model, amortised, (x, x), 5, batch_size=4, sites=[])


def test_a_guide_on_a_device_exports(device):
    x, y = torch.randn(30, 3), torch.randint(400, (30,))
    model = Net()
    model.linear = to_bayesian_(nn.Linear(3, 400))  # type: ignore[assignment]  # priors that move along
    model.to(device)
    guide = AutoNormal(model)
    guide(x.to(device), y.to(device))
    posterior = to_arviz(model, guide, (x, y), method=Samples(5), sites="linear.bias")
    assert np.isfinite(values(posterior, "log_likelihood", "label")).all()


def export(**options):
    guide, x, y = fitted()
    return to_arviz(line, guide, options.pop("data", (x, y)), **{"num_samples": 5, **options})


MISTAKES = {
    "misspelt site": (lambda: export(sites=["slop"]), KeyError, "slop"),
    "no draws": (lambda: export(num_samples=0), ArgumentError, "num_samples.*not 0"),
    "two numbers of draws": (
        lambda: export(num_samples=5, method=Samples(6)),
        ArgumentError,
        "num_samples=5 does not suit method=Samples.num_samples=6.",
    ),
    "method as text": (lambda: export(method="mean"), ArgumentError, "not 'mean'"),
    "no examples": (lambda: export(data=torch.zeros(0)), DataError, "no examples"),
    "NaN": (lambda: export(data=torch.full((3,), torch.nan)), DataError, "NaN"),
    "observations of another length": (
        lambda: export(data=(torch.zeros(3), torch.zeros(4))),
        DataError,
        "rows",
    ),
    "observed site": (lambda: export(site="y"), ModelError, r"no observed site 'y'; it has \['obs'\]"),
    "guide never run": (
        lambda: to_arviz(line, MeanFieldGuide(line), data()),
        GuideError,
        "is not initialised",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_its_remedy(mistake):
    run, error, message = MISTAKES[mistake]
    with pytest.raises(error, match=message):
        run()


@pytest.mark.filterwarnings("ignore:weights are drawn")
def test_a_tuned_noise_is_in_the_draws():
    def model(x, y=None):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            return pyro.sample("obs", dist.Normal(slope * x, 0.5), obs=y)

    x = torch.ones(4)
    guide = LaplaceGuide(model)
    guide.initialize(x, x)
    guide.scale_factors = {"obs": 8.0}
    guide.fit([(x, x)], unconverged="accept")
    draws = to_arviz(model, guide, data=(x, x), num_samples=1000, seed=0).posterior_predictive["obs"]
    assert float(draws.std()) == pytest.approx((16 + 1 / (1 + 4 / 16)) ** 0.5, rel=0.05)


def test_a_graph_with_more_nodes_than_a_batch_names_the_batch_size():
    adjacent = torch.eye(12) + torch.eye(12).roll(1, 0)

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        mean = adjacent @ x * w
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(mean, 0.1), obs=y)

    x, guide = torch.randn(12), AutoNormal(model)
    guide(x, x)
    with pytest.raises(DataError, match=r"nodes of a graph.*batch_size=len\(x\)"):
        to_arviz(model, guide, (x, x), num_samples=3, batch_size=10)
    assert values(to_arviz(model, guide, (x, x), num_samples=3), "posterior_predictive", "y").shape == (
        1,
        3,
        12,
    )
