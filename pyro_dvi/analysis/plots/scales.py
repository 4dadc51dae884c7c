# SPDX-License-Identifier: Apache-2.0
"""How wide is the posterior of each layer?"""

import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from pyro_dvi.analysis.diagnostics.scale_report import ScaleReport, scale_report
from pyro_dvi.analysis.plots.style import (
    VERMILLION,
    blue,
    dots,
    is_narrow,
    legend_above,
    log_axis,
    name_rows,
    own_axes,
    quiet,
    row_size,
)
from pyro_dvi.errors import DataError


def posterior_scales(guide: Any, *, ax: Axes | None = None) -> Axes:
    r"""Draw posterior over prior standard deviations, site by site, the first at the top.

    A dot is the median over the weights of a site, the thick line half of them, the thin line 90 %. At one, a dashed
    line, weights are as uncertain as before training. An orange cross is where training started: dots on crosses were
    hardly trained. Sites whose state is ``"moves"`` or ``"at its start"`` have an open dot, so that a report with a
    snapshot shows which layers have not converged.

    Args:
        guide: a guide with Gaussians, or a :class:`~pyro_dvi.analysis.diagnostics.ScaleReport` of one.
        ax: axes to draw into.

    Returns:
        The axes, with a row for each site; those without a finite prior scale are left out and named below the axis.

    Raises:
        DataError: no site has a prior with a finite standard deviation.
        GuideError: a guide without Gaussians, or one that has not seen its model.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> from pyro_dvi import MeanFieldGuide
        >>> guide = MeanFieldGuide(
        ...     lambda: pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        ... )
        >>> guide.initialize()
        >>> [label.get_text() for label in posterior_scales(guide).get_yticklabels()]
        ['w']
    """
    report = guide if isinstance(guide, ScaleReport) else scale_report(guide)
    rows = [row for row in report.rows if not math.isnan(row.to_prior[2])]
    left_out = [row.site for row in report.rows if math.isnan(row.to_prior[2])]
    if not rows:
        raise DataError(
            f"no site of {report.guide} has a prior with a finite standard deviation to compare with: {left_out}"
        )
    ax = own_axes(ax, figsize=(6.0, 1.3 + 0.2 * len(rows)))
    places = np.arange(len(rows))
    main, size = blue(ax), row_size(ax, len(rows), 5)
    low, quarter, median, three, high = np.array([row.to_prior for row in rows]).T
    ax.hlines(places, low, high, color=main, linewidth=min(1, size / 3), label="90 % of weights")
    ax.hlines(places, quarter, three, color=main, linewidth=0.7 * size, alpha=0.6, label="50 % of weights")
    start = np.array([row.start_to_prior for row in rows])
    if np.isfinite(start).any():
        ax.plot(
            start,
            places,
            color=VERMILLION,
            linestyle="none",
            marker="x",
            markersize=5,
            label="start",
            zorder=4,
        )
    open_dots = np.array([row.state in ("moves", "at its start") for row in rows])
    labels = ("median", "median, not converged")
    dots(ax, median, places, open_dots, color=main, markersize=0.9 * size, labels=labels, zorder=3)
    ax.axvline(1, color=quiet(ax), linestyle="--", linewidth=1, zorder=0)
    shown = np.concatenate([low, high, start[np.isfinite(start)], [1.0]])
    log_axis(ax, shown.min() / 1.3, shown.max() * 1.3)
    names = ", ".join(left_out[:3]) + (", ..." if len(left_out) > 3 else "")
    note = f"\n(without a finite prior scale: {names})" if left_out else ""
    ax.set_xlabel(f"posterior σ / prior σ{note}")
    name_rows(ax, [row.site for row in rows])
    legend_above(ax, pad=0.1, ncols=1 if is_narrow(ax) else 2)
    return ax
