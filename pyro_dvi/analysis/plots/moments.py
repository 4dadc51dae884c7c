# SPDX-License-Identifier: Apache-2.0
"""Where do propagated moments deviate from draws?"""

import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from pyro_dvi.analysis.plots.style import (
    VERMILLION,
    axes_beside,
    blue,
    dots,
    log_axis,
    name_rows,
    own_axes,
    quiet,
    row_size,
)
from pyro_dvi.errors import DataError


def moment_comparison(report: Any, *, ax: Axes | None = None) -> Axes:
    """Draw how far propagated moments are from draws of the weights, layer by layer, the first layer at the top.

    Left the ratio of standard deviations, propagated over sampled, on a logarithmic axis: below one the propagation is
    too narrow. Right the error of the means in standard deviations; what lies in the grey band is chance. Open circles
    are the parameters of the observed site.

    Args:
        report: what :func:`~pyro_dvi.compare_with_sampling` returned.
        ax: axes to draw into, part of a grid as ``plt.subplots`` makes it; the errors take their right part.

    Returns:
        The axes of the ratios; those of the errors are the figure's last, ``ax.figure.axes[-1]``.

    Raises:
        DataError: a report without layers.

    Example:
        >>> from pyro_dvi.analysis.diagnostics import Comparison, LayerComparison
        >>> row = LayerComparison("net.0", "Linear", 0, 4, 0.01, 1.0, 1.0, 0.9)
        >>> moment_comparison(Comparison((row,), 100, 7, "obs")).get_xscale()
        'log'
    """
    rows = report.rows
    if not rows:
        raise DataError("the report has no layers to plot")
    places = np.arange(len(rows))
    is_parameter = np.array([row.layer.rpartition(".")[0] == report.site for row in rows])
    labels = [row.layer + (f" ({row.call + 1})" if row.call else "") for row in rows]
    labels = [
        f"{label}  {row.kind}" if label != row.kind else label
        for label, row in zip(labels, rows, strict=True)
    ]
    ax = own_axes(ax, figsize=(7.0, 1.4 + 0.24 * len(rows)))
    grey = quiet(ax)
    beside = axes_beside(ax, "the errors")
    panels = (
        (ax, [row.sd_ratio for row in rows], blue(ax)),
        (beside, [row.mean_error for row in rows], VERMILLION),
    )
    for panel, values, color in panels:
        numbers = np.asarray(values, dtype=float)
        panel.plot(numbers, places, color=color, linewidth=1, alpha=0.5)
        dots(panel, numbers, places, is_parameter, color=color, markersize=row_size(ax, len(rows), 5))
    low = min([0.5, *(row.sd_ratio for row in rows if row.sd_ratio > 0)])
    high = max([2.0, *(row.sd_ratio for row in rows if math.isfinite(row.sd_ratio))])
    log_axis(ax, low / 1.15, high * 1.15)
    ax.axvline(1, color=grey, linestyle="--", linewidth=1, zorder=0)
    ax.set_xlabel("sd, propagated\n/ sampled")
    name_rows(ax, labels)
    beside.axvspan(0, report.chance, color=grey, alpha=0.2, linewidth=0)
    beside.set_xlim(0, 1.15 * max(2 * report.chance, *(row.mean_error for row in rows)))
    beside.grid(axis="y", color=grey, alpha=0.15)
    beside.set_xlabel("error of the\nmean / sd")
    beside.tick_params(axis="y", labelleft=False, length=0)
    beside.xaxis.set_major_locator(MaxNLocator(3))
    return ax
