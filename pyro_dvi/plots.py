# SPDX-License-Identifier: Apache-2.0
"""Plots: matplotlib axes in, matplotlib axes out.

The only module that knows matplotlib; ``import pyro_dvi`` does not load it. Every function draws into the axes that
it is given, or makes a figure, and returns the axes for titles, limits and saving. Colours are those of Okabe and
Ito, which colour-blind readers can tell apart; no meaning rests on colour alone.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from pyro_dvi import metrics
from pyro_dvi.errors import ArgumentError, DataError

__all__ = ["moment_comparison", "reliability_diagram", "training_history"]

BLUE, VERMILLION, GREY = "#0072B2", "#D55E00", "#666666"

FEW = 5  # examples in a bin below which its accuracy is drawn as an open circle

# Columns of a training record that have a panel of their own, in this order; validation metrics follow.
_TERMS = {
    "loss": "loss (objective)",
    "log_likelihood": "log-likelihood",
    "penalty": "penalty",
    "kl": "KL (unweighted)",
    "posterior_scale": "mean posterior σ",
}


def reliability_diagram(
    probabilities: Any,
    labels: Any,
    *,
    num_bins: int = 15,
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    r"""Draw accuracy against confidence, and below it how many examples each bin holds.

    Points on the diagonal are calibrated, below it overconfident. The grey bars are the gaps that the expected
    calibration error averages; its value is in the title. Error bars are one binomial standard error,
    :math:`\sqrt{a(1-a)/n_b}`, open circles are bins of fewer than five examples, and the bins are those of
    :func:`~pyro_dvi.metrics.reliability_table`.

    Args:
        probabilities: class probabilities ``[..., C]``, or probabilities of label 1, ``[...]``.
        labels: observed classes ``0..C-1``, shape ``[...]``.
        num_bins: equally wide bins between 0 and 1.
        title: of the axes.
        ax: axes to draw into, part of a grid as ``plt.subplots`` makes it; the counts take their lower part.

    Returns:
        The axes of the diagram; those of the counts are the figure's last, ``ax.figure.axes[-1]``.

    Raises:
        ArgumentError: less than one bin.
        DataError: probabilities or labels that cannot be right.

    Source: DeGroot & Fienberg (1983); Niculescu-Mizil & Caruana (2005).

    Example:
        >>> ax = reliability_diagram([[0.9, 0.1], [0.4, 0.6]], [0, 0])
        >>> ax.get_ylabel()
        'accuracy'
    """
    table = metrics.reliability_table(probabilities, labels, num_bins)
    error = metrics.expected_calibration_error(probabilities, labels, num_bins)
    edges, count = table.edges.numpy(), table.count.numpy()
    filled = count > 0
    confidence = table.confidence.numpy()[filled]
    accuracy = table.accuracy.numpy()[filled]
    spread = np.sqrt(accuracy * (1 - accuracy) / count[filled])
    width = 1 / num_bins

    ax = _axes(ax, figsize=(4.2, 5.0))
    ax.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1)
    ax.bar(
        edges[:-1][filled] + width / 2,
        accuracy - confidence,
        bottom=confidence,
        width=width,
        color=GREY,
        alpha=0.25,
        linewidth=0,
    )
    for few in (False, True):
        chosen = (count[filled] < FEW) == few
        style: dict[str, Any] = (
            {"linestyle": "none", "markerfacecolor": "white"} if few else {"linewidth": 1.5}
        )
        ax.errorbar(
            confidence[chosen],
            accuracy[chosen],
            yerr=spread[chosen],
            color=BLUE,
            elinewidth=1,
            marker="o",
            markersize=4,
            alpha=0.5 if few else 1,
            **style,
        )
    ax.set(xlim=(0, 1), ylim=(0, 1.02), ylabel="accuracy")
    ax.set_title(title or "", loc="left", fontsize="medium", fontweight="bold")
    ax.text(
        0.03, 0.05, "calibrated", color=GREY, rotation=45, rotation_mode="anchor", transform_rotates_text=True
    )
    ax.set_title(f"ECE {error:.1%}", loc="right", fontsize="medium")
    ax.tick_params(labelbottom=False)

    counts = _axes_below(ax)
    counts.bar(edges[:-1] + width / 2, count / count.sum(), width=width * 0.9, color=BLUE)
    counts.set(xlabel=f"confidence ({count.sum():,} examples)", ylabel="share", xlim=(0, 1))
    counts.yaxis.set_major_locator(MaxNLocator(3, prune="upper"))
    for axis in (ax.yaxis, counts.yaxis, counts.xaxis):
        axis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return ax


def training_history(history: Any, *, axes: Sequence[Axes] | None = None) -> np.ndarray:
    """Draw the course of training: the loss, its terms, the posterior scales and validation metrics by epoch.

    Whether the loss has settled says little about the posterior: scales converge last. If the mean posterior σ still
    falls in the last epochs, train longer or raise ``scale_multiplier`` of :func:`~pyro_dvi.learning_rates`.

    Args:
        history: what :func:`~pyro_dvi.fit` returned, or a mapping of columns of equal length, with ``epoch`` among
            them or counted from 1.
        axes: one for each panel, in the order of the columns.

    Returns:
        Array of the axes, one for each column that the history has.

    Raises:
        ArgumentError: another number of axes than of panels.
        DataError: nothing recorded, or columns of unequal length.

    Example:
        >>> axes = training_history({"epoch": [1, 2], "loss": [3.0, 2.0], "kl": [0.1, 0.2]})
        >>> [ax.get_ylabel() for ax in axes]
        ['loss (objective)', 'KL (unweighted)']
    """
    columns: Mapping[str, Sequence[float]] = getattr(history, "epochs", history)
    panels = {
        name: text for name, text in _TERMS.items() if name in columns and np.isfinite(columns[name]).any()
    }
    for name in columns:
        if name.startswith("validation_"):
            panels[name] = name.removeprefix("validation_").replace("_", " ") + " (validation)"
    if not panels:
        raise DataError(
            f"the history has nothing to plot: it needs a finite value of {', '.join(_TERMS)} or validation_*, and has "
            f"the columns {list(columns)}"
        )
    length = len(columns[next(iter(panels))])
    epochs = np.asarray(columns["epoch"]) if "epoch" in columns else np.arange(1, length + 1)
    if any(len(columns[name]) != len(epochs) for name in panels):
        raise DataError(f"the columns differ in length: { {name: len(columns[name]) for name in columns} }")
    if axes is None:
        wide = min(len(panels), 3)
        high = math.ceil(len(panels) / wide)
        figure, grid = plt.subplots(
            high, wide, figsize=(3.6 * wide, 2.7 * high), layout="constrained", squeeze=False
        )
        drawn = grid.ravel()[: len(panels)]
        for unused in grid.ravel()[len(panels) :]:
            figure.delaxes(unused)
    else:
        drawn = np.atleast_1d(np.asarray(axes, dtype=object)).ravel()
    if len(drawn) != len(panels):
        raise ArgumentError(
            f"the history has {len(panels)} panels {list(panels)}, but there are {len(drawn)} axes"
        )
    for ax, (name, text) in zip(drawn, panels.items(), strict=True):
        color = VERMILLION if name.startswith("validation_") else BLUE
        ax.plot(
            epochs, np.asarray(columns[name], dtype=float), color=color, marker="o" if length < 20 else None
        )
        ax.set(xlabel="epoch", ylabel=text)
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        ax.yaxis.set_major_locator(MaxNLocator(5))
    return np.asarray(drawn)


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
    ax = _axes(ax, figsize=(7.0, 1.4 + 0.24 * len(rows)))
    beside = _axes_beside(ax)
    panels = (
        (ax, [row.sd_ratio for row in rows], BLUE),
        (beside, [row.mean_error for row in rows], VERMILLION),
    )
    for panel, values, color in panels:
        numbers = np.asarray(values, dtype=float)
        panel.plot(numbers, places, color=color, linewidth=1, alpha=0.5)
        for chosen, face in ((~is_parameter, color), (is_parameter, "white")):
            panel.plot(
                numbers[chosen],
                places[chosen],
                color=color,
                linestyle="none",
                marker="o",
                markersize=5,
                markerfacecolor=face,
            )
        panel.grid(axis="y", color=GREY, alpha=0.15)
    low = min([0.5, *(row.sd_ratio for row in rows if row.sd_ratio > 0)])
    high = max([2.0, *(row.sd_ratio for row in rows if math.isfinite(row.sd_ratio))])
    ax.set_xscale("log")
    ax.set_xlim(low / 1.15, high * 1.15)
    ticks = [t for t in (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 10) if low / 1.15 <= t <= high * 1.15]
    ax.set_xticks(ticks, [f"{t:g}" for t in ticks])
    ax.minorticks_off()
    ax.axvline(1, color=GREY, linestyle="--", linewidth=1, zorder=0)
    ax.set(xlabel="sd, propagated / sampled", yticks=places)
    ax.set_yticks(places, labels, fontsize="small")
    beside.axvspan(0, report.chance, color=GREY, alpha=0.2, linewidth=0)
    beside.set_xlim(0, 1.15 * max(2 * report.chance, *(row.mean_error for row in rows)))
    beside.set_xlabel("error of the mean / sd")
    beside.tick_params(labelleft=False)
    beside.xaxis.set_major_locator(MaxNLocator(4))
    ax.set_ylim(len(rows) - 0.5, -0.5)
    return ax


def _axes(ax: Axes | None, figsize: tuple[float, float]) -> Axes:
    return plt.subplots(figsize=figsize, layout="constrained")[1] if ax is None else ax


def _axes_below(ax: Axes) -> Axes:
    """Split the lower quarter off ``ax``, so that layout engines see two ordinary axes."""
    place = ax.get_subplotspec()
    if place is None:
        raise ArgumentError(
            "ax must be part of a grid, as plt.subplots makes it: the counts take its lower part"
        )
    grid = place.subgridspec(2, 1, height_ratios=[3.2, 1], hspace=0.06)
    ax.set_subplotspec(grid[0])
    figure = ax.get_figure(root=False)
    assert figure is not None, "axes with a place in a grid belong to a figure"
    return figure.add_subplot(grid[1], sharex=ax)


def _axes_beside(ax: Axes) -> Axes:
    """Split the right part off ``ax``."""
    place = ax.get_subplotspec()
    if place is None:
        raise ArgumentError(
            "ax must be part of a grid, as plt.subplots makes it: the errors take its right part"
        )
    grid = place.subgridspec(1, 2, width_ratios=[1.3, 1], wspace=0.06)
    ax.set_subplotspec(grid[0])
    figure = ax.get_figure(root=False)
    assert figure is not None, "axes with a place in a grid belong to a figure"
    return figure.add_subplot(grid[1], sharey=ax)
