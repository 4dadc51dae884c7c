# SPDX-License-Identifier: Apache-2.0
"""Is the confidence of predictions justified?"""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from pyro_dvi.analysis.plots.classes import of_classes
from pyro_dvi.analysis.plots.style import axes_below, blue, own_axes, quiet
from pyro_dvi.predictive import metrics

FEW = 5  # examples in a bin below which its accuracy is drawn as an open circle


def reliability_diagram(
    probabilities: Any,
    labels: Any = None,
    *,
    num_bins: int = 15,
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    r"""Draw accuracy against confidence, and below it how many examples each bin holds.

    Points on the diagonal are calibrated, below it overconfident. The grey bars are the gaps that the expected
    calibration error averages; its value is in the title. Error bars are one binomial standard error,
    :math:`\sqrt{a(1-a)/n_b}`, open circles are bins of fewer than five examples, and the bins are those of
    :func:`~pyro_dvi.predictive.metrics.reliability_table`.

    Args:
        probabilities: class probabilities ``[..., C]``, probabilities of label 1, ``[...]``, or a
            :class:`~pyro_dvi.Prediction` of classes.
        labels: observed classes ``0..C-1``, shape ``[...]``; by default those of the prediction.
        num_bins: equally wide bins between 0 and 1.
        title: of the axes.
        ax: axes to draw into, part of a grid as ``plt.subplots`` makes it; the counts take their lower part.

    Returns:
        The axes of the diagram; those of the counts are the figure's last, ``ax.figure.axes[-1]``.

    Raises:
        ArgumentError: less than one bin.
        DataError: probabilities or labels that cannot be right, or no labels.
        UnsupportedError: a prediction of numbers.

    Source: DeGroot & Fienberg (1983); Niculescu-Mizil & Caruana (2005).

    Example:
        >>> ax = reliability_diagram([[0.9, 0.1], [0.4, 0.6]], [0, 0])
        >>> ax.get_ylabel()
        'accuracy'
    """
    probabilities, labels = of_classes(probabilities, labels)
    table = metrics.reliability_table(probabilities, labels, num_bins)
    error = metrics.expected_calibration_error(probabilities, labels, num_bins)
    edges, count = table.edges.numpy(), table.count.numpy()
    filled = count > 0
    confidence = table.confidence.numpy()[filled]
    accuracy = table.accuracy.numpy()[filled]
    spread = np.sqrt(accuracy * (1 - accuracy) / count[filled])
    width = 1 / num_bins

    ax = own_axes(ax, figsize=(4.2, 5.0))
    grey = quiet(ax)
    ax.plot([0, 1], [0, 1], color=grey, linestyle="--", linewidth=1)
    ax.bar(
        edges[:-1][filled] + width / 2,
        accuracy - confidence,
        bottom=confidence,
        width=width,
        color=grey,
        alpha=0.25,
        linewidth=0,
    )
    for few in (False, True):
        chosen = (count[filled] < FEW) == few
        style: dict[str, Any] = (
            {"linestyle": "none", "markerfacecolor": ax.get_facecolor()} if few else {"linewidth": 1.5}
        )
        ax.errorbar(
            confidence[chosen],
            accuracy[chosen],
            yerr=spread[chosen],
            color=blue(ax),
            elinewidth=1,
            marker="o",
            markersize=4,
            alpha=0.5 if few else 1,
            **style,
        )
    ax.set(xlim=(0, 1), ylim=(0, 1.02), ylabel="accuracy")
    ax.set_title(title or "", loc="left", fontsize="medium", fontweight="bold")
    ax.text(
        0.03, 0.05, "calibrated", color=grey, rotation=45, rotation_mode="anchor", transform_rotates_text=True
    )
    ax.set_title(f"ECE {error:.1%}", loc="right", fontsize="medium")
    ax.tick_params(labelbottom=False)

    counts = axes_below(ax, "the counts")
    counts.bar(edges[:-1] + width / 2, count / count.sum(), width=width * 0.9, color=blue(ax))
    counts.set(
        xlabel=f"confidence ({count.sum():,} example{'s' if count.sum() > 1 else ''})",
        ylabel="share",
        xlim=(0, 1),
    )
    counts.yaxis.set_major_locator(MaxNLocator(3, prune="upper"))
    for axis in (ax.yaxis, counts.yaxis, counts.xaxis):
        axis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return ax
