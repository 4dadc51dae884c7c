# SPDX-License-Identifier: Apache-2.0
"""Predictions as tables."""

import numpy as np
import pyro
import pyro.distributions as dist
import torch

from pyro_dvi import Samples, predict

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
