# SPDX-License-Identifier: Apache-2.0
"""Predictions as tables and ArviZ objects."""

import sys

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_dvi import AtMean, Samples, predict
from pyro_dvi.errors import UnsupportedError
from tests.analysis.arviz_export.reading import groups

X = torch.linspace(-1, 1, 8)


def guide(x=None, y=None):
    pyro.sample("w", dist.Normal(2.0, 0.3))


def of_kind(likelihood):
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            return pyro.sample("obs", likelihood(w * x), obs=y)

    return model


NUMBERS = of_kind(lambda f: dist.Normal(f, 0.5))
PAIRS = of_kind(lambda f: dist.Normal(torch.stack([f, -f], -1), 0.5).to_event(1))
CLASSES = of_kind(lambda f: dist.Categorical(logits=torch.stack([f, -f, 2 * f], -1)))
MASKED = of_kind(lambda f: dist.Normal(f, 0.5).mask(torch.arange(len(f)) > 2))


def test_a_table_has_a_row_for_each_example():
    prediction = predict(NUMBERS, guide, (X, 2 * X), Samples(5), seed=0)
    table = prediction.to_dataframe()
    assert list(table.columns) == ["mean", "std", "aleatoric", "epistemic", "observed", "log_likelihood"]
    assert table.index.name == "example"
    np.testing.assert_array_equal(table["mean"], prediction.mean)
    np.testing.assert_array_equal(table["log_likelihood"], prediction.log_likelihood())
    pairs = predict(PAIRS, guide, X).to_dataframe()
    assert list(pairs.columns)[:4] == ["mean[0]", "mean[1]", "std[0]", "std[1]"]
    classes = predict(CLASSES, guide, (X, torch.zeros(8).long()), Samples(5)).to_dataframe()
    assert list(classes.columns) == [
        *("probabilities[0]", "probabilities[1]", "probabilities[2]"),
        *("entropy", "mutual_information", "observed", "log_likelihood"),
    ]


def test_arviz_has_draws_observations_and_densities():
    prediction = predict(NUMBERS, guide, (X, 2 * X), Samples(5), seed=0, keep_draws=True)
    exported = prediction.to_arviz(seed=1)
    assert exported["posterior_predictive"]["obs"].shape == (1, 5, 8)
    np.testing.assert_array_equal(exported["log_likelihood"]["obs"][0], prediction.draws["log_likelihood"])
    np.testing.assert_array_equal(exported["observed_data"]["obs"], 2 * X)
    many = predict(NUMBERS, guide, (X, 2 * X), AtMean()).to_arviz(40, seed=1)
    assert many["posterior_predictive"]["obs"].shape == (1, 40, 8)
    assert (
        "log_likelihood" not in groups(many) and "compare_held_out" in many.attrs["log_likelihood_left_out"]
    )
    assert predict(NUMBERS, guide, X, AtMean()).to_arviz()["posterior_predictive"]["obs"].shape == (1, 500, 8)
    classes = predict(CLASSES, guide, X, Samples(5)).to_arviz(30)
    assert set(np.unique(classes["posterior_predictive"]["obs"])) <= {0, 1, 2}


def test_arviz_gets_only_the_observations_that_count():
    exported = predict(MASKED, guide, (X, 2 * X), Samples(10), keep_draws=True).to_arviz()
    assert exported["log_likelihood"]["obs"].shape == (1, 10, 5)
    np.testing.assert_array_equal(np.isnan(exported["observed_data"]["obs"]).sum(), 3)
    assert exported["observed_data"]["obs"].shape == (8,)
    assert exported["posterior_predictive"]["obs"].shape == (1, 10, 8)


def test_arviz_gets_the_parts_of_events_that_count():
    mask = torch.arange(16).reshape(8, 2) % 3 > 0
    cut = of_kind(lambda f: dist.Normal(torch.stack([f, -f], -1), 0.5).mask(mask).to_event(1))
    observed = torch.stack([X, X], -1)
    exported = predict(cut, guide, (X, observed), Samples(4), keep_draws=True).to_arviz()
    np.testing.assert_array_equal(exported["observed_data"]["obs"], torch.where(mask, observed, torch.nan))
    assert exported["log_likelihood"]["obs"].shape == (1, 4, 8)
    assert predict(cut, guide, X, AtMean()).to_arviz(4)["posterior_predictive"]["obs"].shape == (1, 4, 8, 2)
    whole = mask.any(-1) & (torch.arange(8) % 2 > 0)
    kept = of_kind(
        lambda f: dist.Normal(torch.stack([f, -f], -1), 0.5).mask(whole[:, None].expand(8, 2)).to_event(1)
    )
    exported = predict(kept, guide, (X, observed), Samples(4), keep_draws=True).to_arviz()
    expected = torch.where(whole[:, None], observed, torch.nan)
    np.testing.assert_array_equal(exported["observed_data"]["obs"], expected)
    np.testing.assert_array_equal(exported["log_likelihood"]["obs_observed"], np.flatnonzero(whole))


def test_arviz_says_where_it_comes_from():
    attributes = predict(NUMBERS, guide, X, AtMean()).to_arviz(4, seed=3).attrs
    assert attributes["inference_library"] == "pyro_dvi"
    assert attributes["site"] == "obs" and attributes["method"] == "AtMean()" and attributes["seed"] == 3


def test_arviz_needs_the_components_of_a_mixture(monkeypatch):
    assert predict(NUMBERS, guide, X, Samples(5)).to_arviz(3)["posterior_predictive"]["obs"].shape == (
        1,
        3,
        8,
    )
    monkeypatch.setattr(sys.modules["pyro_dvi.predictive.predict"], "KEPT_COMPONENTS", 1)
    with pytest.raises(UnsupportedError, match="keep_draws=True"):
        predict(NUMBERS, guide, X, Samples(5)).to_arviz()
