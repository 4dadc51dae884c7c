# SPDX-License-Identifier: Apache-2.0
r"""How did training go, and had it ended when it ended?

How wide is the posterior of each layer?

Which weights could be zero?
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps, rcParams
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from pyro_dvi.analysis import diagnostics
from pyro_dvi.analysis.diagnostics.scale_report import ScaleCourse, ScaleReport, scale_course, scale_report
from pyro_dvi.analysis.plots.style import (
    LINES,
    NUM_COLORS,
    VERMILLION,
    blue,
    color,
    dots,
    is_narrow,
    legend_above,
    log_axis,
    name_rows,
    own_axes,
    own_panels,
    quiet,
    row_size,
    shortened,
)
from pyro_dvi.errors import ArgumentError, DataError

# Columns of a training record that have a panel of their own, in this order; validation metrics follow.
_TERMS = {
    "loss": "loss (objective)",
    "log_likelihood": "log-likelihood",
    "penalty": "penalty",
    "kl": "KL (unweighted)",
    "posterior_scale": "mean posterior σ",
}


def training_history(history: Any, *, axes: Sequence[Axes] | None = None) -> np.ndarray:
    """Draw the course of training: the loss, its terms, the posterior scales and validation metrics by epoch.

    Whether the loss has settled says little about the posterior: scales converge last. The title of their panel says
    how much the mean posterior σ changed in the last tenth of training, which is shaded where it still moved, by more
    than one per cent; it has no verdict where the learning rate had fallen to zero, or where σ has hardly moved since
    the first epoch (:func:`~pyro_dvi.analysis.diagnostics.scale_course`). Then train longer or raise ``scale_multiplier`` of
    :func:`~pyro_dvi.optim.learning_rates`.

    Args:
        history: what :func:`~pyro_dvi.fit` returned, or a mapping of columns of equal length, with ``epoch`` among
            them or counted from 1.
        axes: one for each panel, in the order of the columns.

    Returns:
        Array of the axes, one for each column that the history has.

    Raises:
        ArgumentError: another number of axes than of panels.
        DataError: no history, nothing recorded, or columns of unequal length.

    Source: the warning that variances converge more slowly than means is that of Unlu & Aitchison (2021), section 4.

    Example:
        >>> axes = training_history({"epoch": [1, 2], "loss": [3.0, 2.0], "kl": [0.1, 0.2]})
        >>> [ax.get_ylabel() for ax in axes]
        ['loss (objective)', 'KL (unweighted)']
    """
    columns: Mapping[str, Sequence[float]] = getattr(history, "epochs", history)
    if not isinstance(columns, Mapping):
        raise DataError(
            f"history is what fit returned, or a mapping of columns such as {{'loss': [3.0, 2.0]}}, not "
            f"{type(history).__name__}"
        )
    texts = _TERMS | {
        name: name.removeprefix("validation_").replace("_", " ") + " (validation)"
        for name in columns
        if name.startswith("validation_")
    }
    panels = {
        name: text for name, text in texts.items() if name in columns and np.isfinite(columns[name]).any()
    }
    if not panels:
        raise DataError(
            f"the history has nothing to plot: it needs a finite value of {', '.join(_TERMS)} or validation_*, and has "
            f"the columns {list(columns)}"
        )
    length = len(columns[next(iter(panels))])
    epochs = np.asarray(columns["epoch"]) if "epoch" in columns else np.arange(1, length + 1)
    if any(len(columns[name]) != len(epochs) for name in panels):
        raise DataError(f"the columns differ in length: { {name: len(columns[name]) for name in columns} }")
    what = f"the history has {len(panels)} panels"
    drawn = own_panels(axes, list(panels), what, columns=3, size=(3.6, 2.7))
    for ax, (name, text) in zip(drawn, panels.items(), strict=True):
        values = np.asarray(columns[name], dtype=float)
        known = np.isfinite(values)  # a metric that is not measured every epoch is joined by lines
        line = color(ax, 2) if name.startswith("validation_") else blue(ax)
        _draw(ax, epochs[known], values[known], line)
        ax.set(xlabel="epoch", ylabel=text)
        if name == "posterior_scale":
            _judge(ax, epochs[known], scale_course(values.tolist(), columns.get("lr")))
    return drawn


def _draw(ax: Axes, epochs: np.ndarray, values: np.ndarray, line: str) -> None:
    ax.plot(epochs, values, color=line, marker="o" if len(epochs) < 20 else None)
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    ax.yaxis.set_major_locator(MaxNLocator(5))
    if len(epochs) == 1:
        ax.set_xlim(epochs[0] - 1, epochs[0] + 1)


def _judge(ax: Axes, epochs: np.ndarray, course: ScaleCourse | None) -> None:
    """Say whether the scales still move."""
    if course is None:
        return
    shade = VERMILLION if course.moves or course.doubt else quiet(ax, 0.8)
    ax.set_title(str(course), loc="left", fontsize="small", color=shade)
    if course.moves:
        ax.axvspan(epochs[-1 - course.epochs], epochs[-1], color=VERMILLION, alpha=0.15, linewidth=0)


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


POINTS = 400  # of a curve


def signal_to_noise(guide: Any, *, threshold: float | None = 1.0, ax: Axes | None = None) -> Axes:
    r"""Draw for each ratio :math:`|\mu|/\sigma` the share of weights below it: what pruning there would remove.

    The thick line is all weights, thin ones are the sites: up to six in colours and line styles of their own, more of
    them in shades from the first site to the last. Zero ratios lie at the left edge.

    Args:
        guide: a guide with Gaussians, or what :func:`~pyro_dvi.analysis.diagnostics.signal_to_noise` returned for it.
        threshold: to mark, with the share of all weights below it in the title; None for no mark.
        ax: axes to draw into.

    Returns:
        The axes.

    Raises:
        ArgumentError: a threshold that is not positive.
        GuideError: a guide without Gaussians over real numbers, or one that has not seen its model.

    Source: Graves (2011); Blundell et al. (2015).

    Example:
        >>> from pyro_dvi.analysis.diagnostics import SignalToNoise
        >>> ax = signal_to_noise(SignalToNoise({"w": np.array([0.1, 3.0])}, "guide"))
        >>> ax.get_title("right")
        '50.0% below 1'
    """
    if threshold is not None and not threshold > 0:
        raise ArgumentError(f"threshold is a positive ratio |mean| / sd such as 1.0, got {threshold!r}")
    given = guide if isinstance(guide, diagnostics.SignalToNoise) else diagnostics.signal_to_noise(guide)
    sites = {name: np.sort(ratio, axis=None) for name, ratio in given.ratios.items()}
    everything = np.sort(np.concatenate(list(sites.values())))
    low, high = _limits(everything[everything > 0], threshold)
    ax = own_axes(ax, figsize=(5.4, 3.8))
    levels = np.geomspace(low, high, POINTS)
    few = len(sites) <= NUM_COLORS
    shades = colormaps[rcParams["image.cmap"]](np.linspace(0.05, 0.9, len(sites)))
    for k, (name, ratio) in enumerate(sites.items()):
        if len(sites) == 1:
            break
        ends = k in (0, len(sites) - 1)
        ax.plot(
            levels,
            np.searchsorted(ratio, levels) / len(ratio),
            color=color(ax, k) if few else shades[k],
            linestyle=LINES[k] if few else "-",
            linewidth=1.2 if few else 0.8,
            label=f"{shortened(name, 28)} ({len(ratio):,})" if few or ends else None,
        )
    ax.plot(
        levels,
        np.searchsorted(everything, levels) / len(everything),
        color=rcParams["text.color"],
        linewidth=2.5,
        label=f"all ({len(everything):,} weights)",
    )
    if threshold is not None:
        ax.axvline(threshold, color=quiet(ax), linestyle=":", linewidth=1)
        ax.set_title(f"{given.prunable(threshold):.1%} below {threshold:g}", loc="right", fontsize="medium")
    log_axis(ax, low, high)
    ax.set(ylim=(0, 1), xlabel="|mean| / sd of a weight", ylabel="share of weights below")
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.legend(fontsize="small", frameon=False, loc="upper left")
    return ax


def _limits(positive: np.ndarray, threshold: float | None) -> tuple[float, float]:
    """Where the axis of ratios begins and ends."""
    marks = positive if threshold is None else np.append(positive, threshold)
    low, high = (marks.min(), marks.max()) if len(marks) else (0.1, 10.0)
    if len(positive):  # a few tiny ratios would press all others to the right
        low = min(high, max(low, np.quantile(positive, 0.002)))
    return low / 1.3, high * 1.3
