# SPDX-License-Identifier: Apache-2.0
"""Draws of the prior and where the data lie among them."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from matplotlib import pyplot as plt

from pyro_dvi import plots
from pyro_dvi.analysis.diagnostics.model_checking import prior_predictive_check
from pyro_dvi.errors import ArgumentError, DataError


def check(statistics=None, shift=0.0):
    def model(x, y=None):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)

    x = torch.linspace(-1, 1, 20)
    return prior_predictive_check(model, (x, x + shift), statistics=statistics, num_samples=120, seed=0)


def test_histograms_hold_the_draws_and_a_line_marks_the_data():
    found = check()
    axes = plots.prior_predictive(found)
    for ax, row in zip(axes, found.rows, strict=True):
        assert sum(bar.get_height() for bar in ax.patches) == 120
        assert ax.lines[0].get_xdata()[0] == pytest.approx(row.observed)
        mark = "unusual: " if row.is_unusual else ""
        assert ax.get_xlabel() == f"{mark}p = {row.p_value:.3f} ± {row.error:.3f}"


def test_unusual_statistics_are_marked_in_words():
    axes = plots.prior_predictive(check(shift=50.0))
    assert axes[0].get_xlabel().startswith("unusual: p = 0.000")


def test_counts_have_bins_of_whole_width():
    (ax,) = plots.prior_predictive(check({"positive": lambda y: (y > 0).sum()}))
    assert {bar.get_width() for bar in ax.patches} == {1.0}


def test_a_statistic_that_never_changes():
    (ax,) = plots.prior_predictive(check({"size": len}))
    assert sum(bar.get_height() for bar in ax.patches) == 120


def test_mistakes():
    with pytest.raises(ArgumentError, match="4 statistics .* 1 axes"):
        plots.prior_predictive(check(), axes=[plt.figure().add_subplot()])
    with pytest.raises(DataError, match="'huge' has infinite draws"):
        plots.prior_predictive(
            check({"huge": lambda y: (1e9 * y.max()).exp() if y[0] != -1 else np.float64(1)})
        )
