# SPDX-License-Identifier: Apache-2.0
"""Bands lie where the variances say."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pyro_dvi import plots
from pyro_dvi.errors import DataError

X = np.array([2.0, 0.0, 1.0])  # in no order
MEAN, EPISTEMIC, TOTAL = np.array([5.0, 3.0, 4.0]), np.array([0.04, 0.0, 0.01]), np.array([0.25, 0.16, 0.09])


def band(collection):
    """Upper edge of a filled area at each input."""
    vertices = collection.get_paths()[0].vertices
    return [vertices[vertices[:, 0] == x, 1].max() for x in (0.0, 1.0, 2.0)]


def test_bands_in_the_order_of_the_input():
    ax = plots.regression_band(
        X, {"mean": MEAN, "epistemic": EPISTEMIC, "variance": TOTAL}, data=([0.5], [1.0])
    )
    total, epistemic = ax.collections
    np.testing.assert_allclose(band(total), [3 + 2 * 0.4, 4 + 2 * 0.3, 5 + 2 * 0.5])
    np.testing.assert_allclose(band(epistemic), [3.0, 4 + 2 * 0.1, 5 + 2 * 0.2])
    labels = ax.get_legend_handles_labels()[1]
    assert labels == ["observation, ±2 sd", "function, ±2 sd", "mean", "data (1)"]
    (mean,) = (line for line in ax.lines if line.get_label() == "mean")
    np.testing.assert_allclose(mean.get_ydata(), [3, 4, 5])


def test_a_prediction_with_a_dimension_of_one_output():
    prediction = SimpleNamespace(
        mean=torch.tensor(MEAN)[:, None], variance=torch.tensor(TOTAL, dtype=torch.float32)[:, None]
    )
    ax = plots.regression_band(torch.tensor(X)[:, None], prediction)
    np.testing.assert_allclose(band(ax.collections[0]), [3.8, 4.6, 6.0], rtol=1e-6)


MISTAKES = {
    "lengths": (
        lambda: plots.regression_band(X, {"mean": [1.0]}),
        DataError,
        "mean has 1 values for 3 values of x",
    ),
    "no mean": (
        lambda: plots.regression_band(X, {"variance": TOTAL}),
        DataError,
        "the mean of the prediction is empty",
    ),
    "NaN": (
        lambda: plots.regression_band([np.nan, 1, 2], {"mean": MEAN}),
        DataError,
        "x is empty, or contains values",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_its_remedy(mistake):
    run, error, message = MISTAKES[mistake]
    with pytest.raises(error, match=message):
        run()
