# SPDX-License-Identifier: Apache-2.0
"""Several observed sites, and observations that the model masks."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoNormal
from torch.utils.data import DataLoader, TensorDataset

from pyro_dvi import AtMean, Samples, predict, to_arviz
from pyro_dvi.errors import DataError, ModelError, UnsupportedError
from tests.analysis.arviz_export.reading import ARVIZ_1, az, groups, reopened, values
from tests.predictive.engine.test_vectorised import Loop, made

pytestmark = pytest.mark.filterwarnings("ignore:.* scores '.*point estimate")

X = torch.linspace(-1, 1, 20)
KEPT = X > -0.5


def slope(*_args, **_kwargs):
    pyro.sample("w", dist.Normal(2.0, 0.1))


def two(x, y=None, n=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("size", dist.Normal(w * x, 0.5), obs=y)
        pyro.sample("number", dist.Poisson((w * x).exp()), obs=n)


def two_by_name(x, *, y=None, n=None):
    two(x, y, n)


def scaled(x, *, s, y=None, n=None):
    two(s * x, y, n)


def two_in_one(x, both=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    y, n = (None, None) if both is None else both.unbind(-1)
    with pyro.plate("data", len(x)):
        pyro.sample("size", dist.Normal(w * x, 0.5), obs=y)
        pyro.sample("number", dist.Poisson((w * x).exp()), obs=n)


Y, N = 2 * X, torch.arange(20.0) % 4
WAYS = {
    "arguments": lambda **options: to_arviz(two, slope, (X, Y, N), observed=["y", "n"], **options),
    "mapping": lambda **options: to_arviz(
        two, slope, {"x": X, "y": Y, "n": N}, observed=["n", "y"], **options
    ),
    "by name": lambda **options: to_arviz(
        two_by_name, slope, {"x": X, "y": Y, "n": N}, observed=["y", "n"], **options
    ),
    "loader": lambda **options: to_arviz(
        two, slope, DataLoader(TensorDataset(X, Y, N), batch_size=8), observed=["y", "n"], **options
    ),
    "one argument": lambda **options: to_arviz(two_in_one, slope, (X, torch.stack([Y, N], -1)), **options),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("way", WAYS)
def test_every_observed_site_is_exported_with_the_same_draws(way, tmp_path):
    exported = reopened(WAYS[way](method=Samples(30), seed=0), tmp_path)
    w = torch.as_tensor(values(exported, "posterior", "w")[0])[:, None]
    for name, observed, density in (
        ("size", Y, dist.Normal(w * X, 0.5)),
        ("number", N, dist.Poisson((w * X).exp())),
    ):
        np.testing.assert_array_equal(values(exported, "observed_data", name), observed)
        expected = density.log_prob(observed)
        np.testing.assert_allclose(
            values(exported, "log_likelihood", name)[0], expected, rtol=1e-4, atol=1e-5
        )
        assert values(exported, "posterior_predictive", name).shape == (1, 30, 20)
    noise = values(exported, "posterior_predictive", "size")[0] - (w * X).numpy()
    counts = values(exported, "posterior_predictive", "number")[0] - (w * X).exp().numpy()
    assert abs(np.corrcoef(noise.ravel(), counts.ravel())[0, 1]) < 0.16  # four standard errors: its own noise
    assert set(exported["constant_data"].data_vars) == {"x"}  # no observation among the inputs


def test_a_subset_of_the_sites():
    assert set(WAYS["arguments"](site="size")["log_likelihood"].data_vars) == {"size"}
    assert set(WAYS["arguments"](site=["number"])["posterior_predictive"].data_vars) == {"number"}
    both = WAYS["one argument"](site=["number", "size"])
    assert list(both["observed_data"].data_vars) == ["number", "size"]
    alone = to_arviz(two, slope, X, site=["size", "number"], num_samples=5)  # inputs alone
    assert groups(alone) == {"posterior", "posterior_predictive", "constant_data"}


def test_leave_one_out_of_each_site():
    exported = WAYS["arguments"](method=Samples(200), seed=0)
    for name in ("size", "number"):
        assert az.loo(exported, var_name=name).n_data_points == 20


def chained(x, a=None, b=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", 20, subsample_size=len(x)):
        a = pyro.sample("a", dist.Normal(w * x, 1.0), obs=a)
        pyro.sample("b", dist.Normal(a, 0.1), obs=b)


@pytest.mark.parametrize("method", [AtMean(), Samples(40)])
@pytest.mark.parametrize("batch_size", [1000, 8])
def test_a_site_is_scored_given_the_observed_values_of_those_before_it(method, batch_size):
    """Otherwise it would be scored given values that were drawn once."""
    b = Y + 0.1
    exported = to_arviz(
        chained, slope, (X, Y, b), 40, observed=["a", "b"], method=method, batch_size=batch_size, seed=0
    )
    if method != AtMean():
        expected = dist.Normal(Y, 0.1).log_prob(b).expand(40, -1)
        np.testing.assert_allclose(values(exported, "log_likelihood", "b")[0], expected, rtol=1e-4)
    noise = values(exported, "posterior_predictive", "b")[0] - Y.numpy()
    assert abs(noise.std() / 0.1 - 1) < 4 / (2 * noise.size) ** 0.5  # four standard errors, fixed seed
    assert values(exported, "posterior_predictive", "a").std() > 0.5


def test_a_site_that_depends_on_what_was_not_observed_takes_draws():
    inputs = {"x": X, "b": Y}
    for data, options in ((X, {}), (inputs, {"observed": "b"})):
        with pytest.raises(UnsupportedError, match=r"'b' depends on sites \['a'\].*AtMean.*Samples\(n\)"):
            to_arviz(chained, slope, data, 5, site="b", method=AtMean(), **options)
    complete = {"observed": ["a", "b"], "site": "b", "method": AtMean()}
    with pytest.raises(UnsupportedError, match=r"'b' depends on sites \['a'\]"):
        to_arviz(chained, slope, (X, Y, Y), 5, predictions=X, **complete)
    draws = to_arviz(chained, slope, X, method=Samples(500), site="b", seed=0)
    residuals = values(draws, "posterior_predictive", "b")[0] - Y.numpy()
    assert abs(residuals.mean(1).std() * 20**0.5 - 1) < 0.2  # noise of both sites, six errors


MISTAKES = {
    "an input by name": (
        lambda: to_arviz(scaled, slope, {"x": X, "s": X, "y": Y, "n": N}, observed=["y", "n"]),
        DataError,
        r"arguments \['s'\].* are keyword-only",
    ),
    "no such site": (lambda: WAYS["arguments"](site="sise"), ModelError, r"no observed site 'sise'; it has"),
    "inputs alone": (lambda: to_arviz(two, slope, X), ModelError, "several sites.*site="),
    "one observation of two": (
        lambda: to_arviz(two, slope, (X, Y), observed="y"),
        ModelError,
        "several sites.*site=",
    ),
    "one of two arguments": (
        lambda: to_arviz(two, slope, (X, Y), observed=["y", "n"]),
        DataError,
        r"some observations but not \['n'\]",
    ),
    "argument": (
        lambda: to_arviz(two, slope, (X, Y, N), observed=["y", "m"]),
        ValueError,
        "'m' is not in list",
    ),
    "unobserved": (
        lambda: to_arviz(two, slope, {"x": X, "n": N}, observed="n", site=["number", "size"]),
        DataError,
        "site 'size' is not observed",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_its_remedy(mistake):
    run, error, message = MISTAKES[mistake]
    with pytest.raises(error, match=message):
        run()


# Masks --------------------------------------------------------------------------------------------------------------


def by_handler(x, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)), poutine.mask(mask=x > -0.5):
        pyro.sample("obs", dist.Normal(w * x, 1.0), obs=y)


def by_distribution(x, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("obs", dist.Normal(w * x, 1.0).mask(x > -0.5), obs=y)


def by_observation(x, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    mask = True if y is None else y > -900
    with pyro.plate("data", len(x)), poutine.mask(mask=mask):
        pyro.sample("obs", dist.Normal(w * x, 1.0), obs=y)


@pytest.mark.every(5)
@pytest.mark.parametrize("model", [by_handler, by_distribution, by_observation])
@pytest.mark.parametrize("method", [AtMean(), Samples(50)])
@pytest.mark.parametrize("batch_size", [1000, 7])
def test_masked_observations_are_left_out(model, method, batch_size, tmp_path):
    y = torch.where(KEPT, Y, -999.0)
    exported = to_arviz(model, slope, (X, y), 50, method=method, batch_size=batch_size, seed=0)
    exported = reopened(exported, tmp_path)
    np.testing.assert_array_equal(values(exported, "observed_data", "obs"), torch.where(KEPT, Y, torch.nan))
    assert exported["observed_data"]["obs"].dims == ("data",)
    assert values(exported, "posterior_predictive", "obs").shape == (1, 50, 20)
    if method != AtMean():
        assert exported["log_likelihood"]["obs"].dims[-1] == "obs_observed"
        np.testing.assert_array_equal(exported["log_likelihood"]["obs_observed"], np.flatnonzero(KEPT))
        w = torch.as_tensor(values(exported, "posterior", "w")[0])[:, None]
        expected = dist.Normal(w * X, 1.0).log_prob(Y)[:, KEPT]
        np.testing.assert_allclose(values(exported, "log_likelihood", "obs")[0], expected, rtol=1e-4)
        assert az.loo(exported).n_data_points == int(KEPT.sum())


def test_masked_cells_of_a_table_are_found_by_their_places():
    kept = torch.rand(6, 4) > 0.4

    def table(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("column", 4, dim=-1), pyro.plate("row", len(x), dim=-2), poutine.mask(mask=kept):
            pyro.sample("obs", dist.Normal(w * x[:, None].expand(-1, 4), 1.0), obs=y)

    y = torch.randn(6, 4)
    exported = to_arviz(table, slope, (X[:6], y), 3, dims={"obs": ["person", "item"]})
    assert exported["posterior_predictive"]["obs"].dims[2:] == ("person", "item")
    places = exported["log_likelihood"]["obs_observed"].values
    np.testing.assert_array_equal(values(exported, "observed_data", "obs"), torch.where(kept, y, torch.nan))
    assert exported["observed_data"]["obs"].dims == ("person", "item")
    np.testing.assert_array_equal(
        np.stack(np.unravel_index(places, (6, 4))), np.stack(np.nonzero(kept.numpy()))
    )


def test_masks_of_whole_events():
    def events(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            mask = KEPT[:, None].expand(-1, 3)
            pairs = dist.Normal((w * x)[:, None].expand(-1, 3), 1.0).mask(mask).to_event(1)
            pyro.sample("obs", pairs, obs=y)

    y = torch.randn(20, 3)
    exported = to_arviz(events, slope, (X, y), method=Samples(3))
    np.testing.assert_array_equal(
        values(exported, "observed_data", "obs"), torch.where(KEPT[:, None], y, torch.nan)
    )
    assert exported["observed_data"]["obs"].dims == ("data", "obs_dim_1")
    w = float(values(exported, "posterior", "w")[0, 0])
    expected = dist.Normal((w * X)[:, None], 1.0).to_event(1).log_prob(y)[KEPT]
    np.testing.assert_allclose(values(exported, "log_likelihood", "obs")[0, 0], expected, rtol=1e-5)


def test_masks_of_parts_of_events():
    mask = (torch.arange(40).reshape(20, 2) % 3 > 0) & KEPT[:, None]

    def events(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            pairs = dist.Normal((w * x)[:, None].expand(-1, 2), 1.0)
            pyro.sample("obs", pairs.mask(mask).to_event(1), obs=y)

    y = torch.randn(20, 2)
    exported = to_arviz(events, slope, (X, torch.where(mask, y, torch.tensor(-999.0))), method=Samples(3))
    np.testing.assert_array_equal(values(exported, "observed_data", "obs"), torch.where(mask, y, torch.nan))
    w = float(values(exported, "posterior", "w")[0, 0])
    expected = (dist.Normal((w * X)[:, None], 1.0).log_prob(y) * mask).sum(-1)[KEPT]
    np.testing.assert_allclose(values(exported, "log_likelihood", "obs")[0, 0], expected, rtol=1e-5)


def test_a_mask_that_comes_with_the_observations():
    def labels(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            pairs = dist.Bernoulli(logits=(w * x)[:, None].expand(-1, 2))
            known = pairs if y is None else pairs.mask(torch.tensor([True, False]))
            pyro.sample("obs", known.to_event(1), obs=y)

    exported = to_arviz(labels, slope, (X, torch.zeros(20, 2)), 3)
    w = torch.tensor(values(exported, "posterior", "w")[0, :, None])
    expected = dist.Bernoulli(logits=w * X).log_prob(torch.zeros(20))
    np.testing.assert_allclose(values(exported, "log_likelihood", "obs")[0], expected, rtol=1e-5)
    scores = predict(labels, slope, (X, torch.zeros(20, 2)), AtMean()).metrics()
    assert scores["nll"] == pytest.approx(
        -float(dist.Bernoulli(logits=2.0 * X).log_prob(torch.zeros(20)).mean())
    )


def test_parts_of_correlated_observations_are_not_scored():
    def pairs(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            mean = (w * x)[:, None].expand(-1, 2)
            pyro.sample("obs", dist.NanMaskedMultivariateNormal(mean, torch.eye(2)), obs=y)

    with pytest.raises(UnsupportedError, match="'obs' excludes parts of single observations.*to_event"):
        to_arviz(pairs, slope, (X, torch.tensor([0.0, torch.nan]).expand(20, 2)), 3)


def test_masked_labels_are_real_numbers_in_all_groups():
    def labels(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)), poutine.mask(mask=KEPT):
            pyro.sample("obs", dist.Categorical(logits=torch.stack([w * x, -x], -1)), obs=y)

    exported = to_arviz(labels, slope, (X, (X > 0).long()), 5, prior=4)
    np.testing.assert_array_equal(
        values(exported, "observed_data", "obs"), torch.where(KEPT, (X > 0).double(), torch.nan)
    )
    for group in ("posterior_predictive", "prior_predictive"):
        drawn = values(exported, group, "obs")
        assert drawn.dtype.kind == "f" and set(np.unique(drawn)) <= {0, 1}


def test_a_mask_that_depends_on_the_draw_is_refused():
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)), poutine.mask(mask=w * x > 0.1):
            pyro.sample("obs", dist.Normal(w * x, 1.0), obs=y)

    def wide(x, y=None):
        pyro.sample("w", dist.Normal(0.0, 1.0))

    with pytest.raises(UnsupportedError, match="mask of site 'obs' depends on the latent values"):
        to_arviz(model, wide, (X, Y), method=Samples(9), seed=0)
    assert to_arviz(model, wide, X, method=Samples(9)) is not None  # nothing is scored


def test_a_mask_that_leaves_nothing_out_changes_nothing():
    exported = to_arviz(by_handler, slope, (X + 2, Y), 3)
    assert exported["log_likelihood"]["obs"].dims[-1] == "data"
    assert not ARVIZ_1 or "obs_observed" not in exported["log_likelihood"].dims


# Many draws at a time ---------------------------------------------------------------------------------------------

VECTORISED = ["regressor", "own noise", "functional", "Bernoulli", "labels", "Poisson", "vectors", "masked"]


@pytest.mark.every(3)
@pytest.mark.parametrize("name", [*VECTORISED, "no moments", "conv net", "branching", "local"])
def test_a_vectorised_export_has_the_numbers_of_the_loop(name):
    model, guide, x, y = made(name, torch.float64, AutoNormal)
    exports = [
        to_arviz(model, guide, (x, y), method=rule, sites=[], seed=5, predictions=x)
        for rule in (Samples(70), Loop(70))
    ]
    site = next(iter(exports[0]["posterior_predictive"].data_vars))
    for group in ("posterior_predictive", "log_likelihood", "predictions"):
        found, expected = (values(exported, group, site) for exported in exports)
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
    assert np.unique(values(exports[0], "posterior_predictive", site)[0, :, 0], axis=0).shape[0] > 1


def test_few_runs_serve_all_draws():
    inner, guide, x, y = made("own noise", torch.float32, AutoNormal)
    runs = []

    def model(x, y=None):
        runs.append(1)
        return inner(x, y)

    to_arviz(model, guide, (x, y), method=Samples(100), max_site_size=10**6, seed=0)
    assert (
        len(runs) == 6
    )  # a look at the model, the batch, a draw with every check, a probe, and two for the rest
    runs.clear()
    to_arviz(model, guide, (x, y), method=Samples(100), sites=[], predictions=x, seed=0)
    assert len(runs) <= 20
    runs.clear()
    with torch.no_grad():
        given = {name: torch.stack([value] * 100) for name, value in guide(x, y).items()}
    to_arviz(model, given, (x, y), max_site_size=10**6, seed=0)
    assert len(runs) <= 8


def test_noise_does_not_repeat_the_numbers_of_the_weights():
    """Fails for one seed in a thousand at 24 correlations of four standard errors; the seed is fixed."""

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("obs", dist.Normal(w * x, 1.0), obs=y)

    def guide(x, y=None):
        pyro.sample("w", dist.Normal(0.0, 1.0))

    exported = to_arviz(
        model, guide, torch.zeros(8), method=Samples(200), prior=200, predictions=torch.zeros(8), seed=0
    )
    for weights, noise in (
        ("posterior", "posterior_predictive"),
        ("prior", "prior_predictive"),
        ("posterior", "predictions"),
    ):
        table = np.c_[values(exported, weights, "w")[0], values(exported, noise, "obs")[0]]
        assert np.abs(np.corrcoef(table.T)[0, 1:]).max() < 4 / 200**0.5
