# SPDX-License-Identifier: Apache-2.0
"""Log scores of several predictions of the same held-out data."""

import math
import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from pyro_dvi import AtMean, MeanFieldGuide, Moments, Samples, predict
from pyro_dvi.analysis.diagnostics.held_out import compare_held_out
from pyro_dvi.errors import DataError

X = torch.linspace(-1, 1, 40)
Y = 2 * X + 0.3 * torch.sin(37 * X)


def model(x, y=None):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        return pyro.sample("obs", dist.Normal(slope * x, 0.5), obs=y)


def predictions(data=(X, Y), **options):
    guide = MeanFieldGuide(model)
    pyro.clear_param_store()  # of the guide of another call
    pyro.set_rng_seed(0)  # of its start
    guide(X, Y)
    methods = {"mean": AtMean(), "moments": Moments(), "draws": Samples(20)}
    return {name: predict(model, guide, data, method, seed=0, **options) for name, method in methods.items()}


def test_the_table_is_that_of_sums_and_their_standard_errors():
    predicted = predictions()
    table = compare_held_out(predicted)
    scores = {name: p.log_likelihood().double().numpy() for name, p in predicted.items()}
    best = max(scores, key=lambda name: scores[name].sum())
    assert list(table.index) == sorted(scores, key=lambda name: -scores[name].sum())
    assert list(table["rank"]) == [0, 1, 2]
    for name, score in scores.items():
        row, d = table.loc[name], score - scores[best]
        assert row["elpd"] == pytest.approx(score.sum(), rel=1e-12)
        assert row["se"] == pytest.approx(math.sqrt(40) * score.std(ddof=1), rel=1e-12)
        assert row["elpd_diff"] == pytest.approx(d.sum(), rel=1e-12) and row["elpd_diff"] <= 0
        assert row["dse"] == pytest.approx(math.sqrt(40) * d.std(ddof=1), rel=1e-12)


def test_observations_may_come_later_and_batches_do_not_matter():
    whole = compare_held_out(predictions())
    parts = predictions(batch_size=7)
    np.testing.assert_allclose(compare_held_out(parts).to_numpy(), whole.to_numpy(), rtol=1e-4, atol=1e-6)
    given = {name: p for name, p in predictions().items() if name != "draws"}
    later = {name: p for name, p in predictions(X).items() if name != "draws"}  # draws keep no distribution
    np.testing.assert_allclose(
        compare_held_out(later, Y).to_numpy(), compare_held_out(given).to_numpy(), rtol=1e-5, atol=1e-6
    )


def test_parts_of_an_example_are_one_example():
    def pairs(x, y=None):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        with pyro.plate("parts", 2, dim=-2), pyro.plate("data", len(x), dim=-1):
            return pyro.sample("obs", dist.Normal(slope * x, 0.5).expand([2, len(x)]), obs=y)

    def guide(x, y=None):
        pyro.sample("slope", dist.Delta(torch.tensor(2.0)))

    prediction = predict(pairs, guide, X, AtMean())
    twice = torch.stack([Y, Y], 1)  # examples first
    once = predict(model, guide, (X, Y))
    np.testing.assert_allclose(
        compare_held_out({"a": prediction}, twice).loc["a", ["elpd", "se"]].to_numpy(float),
        2 * compare_held_out({"a": once}).loc["a", ["elpd", "se"]].to_numpy(float),
        rtol=1e-6,
    )


def test_one_example_has_no_standard_error():
    table = compare_held_out(predictions((X[:1], Y[:1])))
    assert table["se"].isna().all() and table["dse"].isna().all()


def test_arviz_draws_the_table():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.23 announces version 1
        import arviz as az
    if int(az.__version__.split(".")[0]) < 1:
        pytest.skip("az.plot_compare of ArviZ 0.x reads the columns of az.compare only")
    assert az.plot_compare(compare_held_out(predictions()), backend="matplotlib") is not None


MISTAKES = {
    "no observations": (lambda: compare_held_out(predictions(X)), DataError, "no observed values"),
    "other lengths": (
        lambda: compare_held_out({**predictions(), "short": predictions((X[:9], Y[:9]))["mean"]}),
        DataError,
        "'short' and 'mean' predict different examples",
    ),
    "other observations": (
        lambda: compare_held_out({**predictions(), "late": predictions((X, Y + 1))["mean"]}),
        DataError,
        "'late' and 'mean' predict different examples, sites, observations",
    ),
    "shuffled": (
        lambda: compare_held_out(
            predictions(DataLoader(TensorDataset(X, Y), batch_size=40, shuffle=True)), Y
        ),
        DataError,
        "shuffles",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_its_remedy(mistake):
    run, error, message = MISTAKES[mistake]
    with pytest.raises(error, match=message):
        run()
