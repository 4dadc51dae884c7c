# SPDX-License-Identifier: Apache-2.0
"""Validation scores against settings."""

import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt

from pyro_dvi import plots
from pyro_dvi.errors import ArgumentError, NonFiniteError
from tests.analysis.tuning.stand_ins import distance, stand_in, tune


def train(**settings):
    if settings["lr"] == 1.0:
        raise NonFiniteError("the loss is nan")
    return stand_in(**settings)


def score(model, guide, validation):
    rows = torch.tensor([0.0, 1.0, 0.0, 2.0])
    return (
        rows * model()["lr"]
        + distance(lr=0.1, depth=2)(model, guide, validation)
        + (model()["act"] != "relu")
    )


@pytest.fixture
def tuned():
    return tune(train, {"act": ("relu", "tanh"), "depth": (1, 2, 4), "lr": (0.01, 0.1, 1.0)}, score=score)


def test_one_panel_for_each_setting(tuned):
    act, depth, lr = plots.tuning(tuned)
    assert [ax.get_xlabel() for ax in (act, depth, lr)] == ["act", "depth", "lr"]
    assert [ax.get_xscale() for ax in (act, depth, lr)] == ["linear", "log", "log"]
    assert [label.get_text() for label in act.get_xticklabels()] == ["relu", "tanh"]
    line, _, (bars,) = lr.containers[0].lines
    x, y = np.array(line.get_data(), dtype=float)
    np.testing.assert_allclose(x, [0.01, 0.1])  # without the failed one
    table = tuned.table.to_dataframe().query("act == 'relu' and depth == 2 and lr < 1")
    np.testing.assert_allclose(y, table["score"])
    halves = [np.ptp(segment[:, 1]) / 2 for segment in bars.get_segments()]
    np.testing.assert_allclose(halves, table["paired_standard_error"])
    assert len(lr.lines[0].get_xdata()) == tuned.table.rows - len(
        tuned.failures
    )  # grey dots: all that have a score
    dashed = [one for one in lr.lines if one.get_linestyle() == "--"]
    np.testing.assert_allclose(dashed[0].get_xdata(), tuned.settings["lr"])


def test_scores_without_rows_and_one_setting():
    tuned = tune(stand_in, {"lr": (0, 0.1, 0.2)}, score=lambda m, g, v: abs(m()["lr"] - 0.1))
    (ax,) = plots.tuning(tuned)
    assert ax.get_xscale() == "linear"  # zero has no logarithm
    plots.tuning(tuned, axes=[ax])


def test_another_number_of_axes(tuned):
    with pytest.raises(ArgumentError, match="3 panels"):
        plots.tuning(tuned, axes=[plt.subplots()[1]])


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")
