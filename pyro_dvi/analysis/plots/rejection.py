# SPDX-License-Identifier: Apache-2.0
"""Are the uncertain predictions the wrong ones?"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from pyro_dvi.analysis.plots.classes import of_classes
from pyro_dvi.analysis.plots.style import LINES, color, legend_above, own_axes, quiet, shortened
from pyro_dvi.errors import DataError
from pyro_dvi.predictive import metrics


def rejection_curve(
    predictions: Any,
    labels: Any = None,
    *,
    uncertainty: Any = None,
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    r"""Draw the error of what is left when the most uncertain predictions are rejected.

    Below each curve, in its colour, lies the area that no ranking can undercut: that of an oracle, which rejects the
    wrong ones first and has the error :math:`\max(0, (e - r)/(1 - r))`. A ranking that says nothing keeps the error e,
    a thin line. The legend has the area under the curve, :func:`~pyro_dvi.predictive.metrics.aumrc`. Low is good.

    Args:
        predictions: class probabilities ``[N, C]`` (``[N]`` of label 1), a :class:`~pyro_dvi.Prediction`, or a mapping
            from names of methods to either.
        labels: observed classes ``[N]``; by default those of the predictions.
        uncertainty: what to rank by, ``[N]``, high values first; a mapping by name where ``predictions`` is one. By
            default the predictive entropy.
        title: of the axes.
        ax: axes to draw into.

    Returns:
        The axes.

    Raises:
        DataError: probabilities, labels or uncertainties that cannot be right, or a method without its own.

    Source: Schmitt & Roth (2021), appendix D.

    Example:
        >>> ax = rejection_curve([[0.9, 0.1], [0.6, 0.4]], [0, 1])
        >>> ax.get_legend_handles_labels()[1]
        ['AUMRC 0.250']
    """
    methods = predictions if isinstance(predictions, Mapping) else {"": predictions}
    if not methods:
        raise DataError("there are no predictions to plot: the mapping is empty")
    ax = own_axes(ax, figsize=(5.0, 3.8))
    highest = 0.0
    for k, (name, prediction) in enumerate(methods.items()):
        p, y = of_classes(prediction, labels, name)
        u = uncertainty
        if isinstance(uncertainty, Mapping):
            if name not in uncertainty:
                raise DataError(f"method {name!r} has no uncertainty; there are those of {list(uncertainty)}")
            u = uncertainty[name]
        curve = metrics.rejection_curve(p, y, u)
        areas = f"AUMRC {metrics.aumrc(p, y, u):.3f}"
        error = float(curve.error[0])
        rejected = curve.rejected.numpy()
        ax.plot(
            rejected,
            curve.error.numpy(),
            color=color(ax, k),
            linestyle=LINES[k % len(LINES)],
            label=f"{shortened(name, 24)}: {areas}" if name else areas,
            zorder=3,
        )
        kept = np.maximum(1 - rejected, 1e-12)  # at the last point nothing is left that could be wrong
        oracle = np.clip(error - rejected, 0, None) / kept
        ax.fill_between(rejected, oracle, color=color(ax, k), alpha=0.12, linewidth=0)
        ax.axhline(error, color=color(ax, k), linewidth=0.6, alpha=0.7, zorder=1)
        highest = max(highest, float(curve.error.max()))
    ax.set(xlim=(0, 1), ylim=(0, 1.08 * highest or 0.1), xlabel="rejected", ylabel="error of the rest")
    if title:
        ax.set_title(title, loc="left", fontsize="medium", fontweight="bold")
    ax.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.yaxis.set_major_locator(MaxNLocator(5))
    legend = legend_above(ax, 1.08 if title else 1, alignment="left")
    legend.set_title("thin: random rejection; shaded: below an oracle")
    legend.get_title().set(color=quiet(ax, 0.75), fontsize="x-small")
    return ax
