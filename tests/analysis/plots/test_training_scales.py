# SPDX-License-Identifier: Apache-2.0
"""Rows are the quantiles of the report."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from matplotlib import pyplot as plt

from pyro_dvi import MeanFieldGuide, plots
from pyro_dvi.analysis.diagnostics.posterior_spread import scale_snapshot
from pyro_dvi.analysis.diagnostics.scale_report import LEVELS, ScaleReport, scale_report
from pyro_dvi.errors import DataError


def model():
    pyro.sample("a", dist.Normal(torch.zeros(4), 2.0).to_event(1))
    pyro.sample("heavy", dist.Cauchy(torch.zeros(3), 1.0).to_event(1))
    pyro.sample("b", dist.Normal(torch.zeros(2, 3), 0.5).to_event(2))


def trained():
    guide = MeanFieldGuide(model)
    guide.initialize()
    with torch.no_grad():
        guide.scales.a_unconstrained += torch.tensor([0.5, 1.0, 1.5, 2.0])
        guide.scales.b_unconstrained += 1
    return guide


def test_rows_are_quantiles_relative_to_the_prior():
    guide = trained()
    ax = plots.posterior_scales(guide)
    rows = {row["site"]: row for row in scale_report(guide).rows}
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]
    assert "without a finite prior scale: heavy" in ax.get_xlabel()
    ninety, half = (np.array(lines.get_segments())[:, :, 0] for lines in ax.collections)
    assert [lines.get_label() for lines in ax.collections] == ["90 % of weights", "50 % of weights"]
    for k, site in enumerate("ab"):
        np.testing.assert_allclose(ninety[k], [rows[site]["to_prior_5%"], rows[site]["to_prior_95%"]])
        np.testing.assert_allclose(half[k], [rows[site]["to_prior_25%"], rows[site]["to_prior_75%"]])
    start, median = ax.lines[:2]
    np.testing.assert_allclose(median.get_xdata(), [rows[site]["to_prior_50%"] for site in "ab"])
    np.testing.assert_allclose(start.get_xdata(), math.exp(-3), rtol=1e-5)


def test_sites_that_have_not_converged_have_an_open_dot():
    guide = trained()
    earlier = scale_snapshot(guide)
    earlier["b"] = 2 * earlier["b"]
    ax = plots.posterior_scales(scale_report(guide, earlier=earlier))
    open_dots = next(line for line in ax.lines if line.get_label() == "median, not converged")
    assert list(open_dots.get_ydata()) == [1]


def test_sixty_layers_in_small_axes_have_readable_names():
    ratios = {f"to_prior_{name}": 0.1 * (k + 1) for k, name in enumerate(LEVELS)}
    row = ratios | {"start_to_prior": 0.1, "state": "unknown"}
    rows = [{"site": f"layer{k}.weight", **row} for k in range(60)]
    _, ax = plt.subplots(figsize=(4, 3), layout="constrained")
    plots.posterior_scales(ScaleReport("guide", rows, {}), ax=ax)
    ax.figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in ax.get_yticklabels()]
    assert not any(a.overlaps(b) for a, b in zip(boxes, boxes[1:], strict=False))
    assert ax.get_ylim() == (59.5, -0.5)
    ticks = [label.get_window_extent() for label in ax.get_xticklabels() if label.get_text()]
    assert not any(a.overlaps(b) for a, b in zip(ticks, ticks[1:], strict=False))


def test_priors_without_a_scale_alone_are_refused():
    guide = MeanFieldGuide(lambda: pyro.sample("c", dist.Cauchy(0.0, 1.0)))
    guide.initialize()
    with pytest.raises(DataError, match=r"finite standard deviation .*\['c'\]"):
        plots.posterior_scales(guide)
