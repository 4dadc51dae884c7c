# SPDX-License-Identifier: Apache-2.0
"""Plots of the training, and of the posterior scales that it left."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from pyro_dvi.analysis import diagnostics
from pyro_dvi.analysis.diagnostics.scale_report import (
    LEVELS,
    ScaleReport,
    SignalToNoise,
    scale_course,
    scale_report,
)
from pyro_dvi.analysis.plots.style import (
    LINES,
    NUM_COLORS,
    VERMILLION,
    blue,
    color,
    dots,
    legend_above,
    log_axis,
    name_rows,
    own_axes,
    own_panels,
    quiet,
    row_size,
    shortened,
)
from pyro_dvi.errors import DataError

POINTS = 400  # of a curve

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
    the first epoch. Then train longer or raise ``scale_multiplier`` of
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
        ax.plot(epochs[known], values[known], color=line, marker="o" if known.sum() < 20 else None)
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        ax.yaxis.set_major_locator(MaxNLocator(5))
        ax.set(xlabel="epoch", ylabel=text)
        course = scale_course(values.tolist(), columns.get("lr")) if name == "posterior_scale" else None
        if course is not None:
            settled = course.state == "settled"
            shade = quiet(ax, 0.8) if settled else VERMILLION
            ax.set_title(str(course), loc="left", fontsize="small", color=shade)
        if course is not None and course.moves:
            ends = epochs[known][-1 - course.epochs], epochs[known][-1]
            ax.axvspan(*ends, color=VERMILLION, alpha=0.15, linewidth=0)
    return drawn


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
        >>> import pyro, pyro.distributions as dist, torch
        >>> from pyro_dvi import MeanFieldGuide
        >>> guide = MeanFieldGuide(
        ...     lambda: pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        ... )
        >>> guide.initialize()
        >>> [label.get_text() for label in posterior_scales(guide).get_yticklabels()]
        ['w']
    """
    report = guide if isinstance(guide, ScaleReport) else scale_report(guide)
    rows = [row for row in report.rows if not np.isnan(row["to_prior_50%"])]
    left_out = [row["site"] for row in report.rows if np.isnan(row["to_prior_50%"])]
    if not rows:
        raise DataError(f"no site has a prior with a finite standard deviation to compare with: {left_out}")
    ax = own_axes(ax, figsize=(6.0, 1.3 + 0.2 * len(rows)))
    places, main, size = np.arange(len(rows)), blue(ax), row_size(ax, len(rows), 5)
    low, quarter, median, three, high, start = (
        np.array([row[name] for row in rows])
        for name in (*(f"to_prior_{level}" for level in LEVELS), "start_to_prior")
    )
    ax.hlines(places, low, high, color=main, linewidth=min(1, size / 3), label="90 % of weights")
    ax.hlines(places, quarter, three, color=main, linewidth=0.7 * size, alpha=0.6, label="50 % of weights")
    if np.isfinite(start).any():
        cross: dict[str, Any] = {"marker": "x", "markersize": 5, "linestyle": "none", "zorder": 4}
        ax.plot(start, places, color=VERMILLION, label="start", **cross)
    unfinished = np.array([row["state"] in ("moves", "at its start") for row in rows])
    labels = ("median", "median, not converged")
    dots(ax, median, unfinished, labels, color=main, markersize=0.9 * size, zorder=3)
    ax.axvline(1, color=quiet(ax), linestyle="--", linewidth=1, zorder=0)
    shown = np.concatenate([low, high, start[np.isfinite(start)], [1.0]])
    log_axis(ax, shown.min() / 1.3, shown.max() * 1.3)
    names = ", ".join(left_out[:3]) + (", ..." if len(left_out) > 3 else "")
    note = f"\n(without a finite prior scale: {names})" if left_out else ""
    ax.set_xlabel(f"posterior σ / prior σ{note}")
    name_rows(ax, [row["site"] for row in rows])
    legend_above(ax, ncols=2)
    return ax


def signal_to_noise(guide: Any, *, ax: Axes | None = None) -> Axes:
    r"""Draw for each ratio :math:`|\mu|/\sigma` the share of weights below it, which pruning there would remove.

    The thick line is all weights, thin ones are the sites: up to six in colours and line styles of their own, more of
    them in grey. A dotted line marks the ratio 1, and the title has the share below it.

    Args:
        guide: a guide with Gaussians, or the value of :func:`~pyro_dvi.analysis.diagnostics.signal_to_noise` for it.
        ax: axes to draw into.

    Returns:
        The axes.

    Raises:
        GuideError: a guide without Gaussians over real numbers, or one that has not seen its model.

    Source: Graves (2011); Blundell et al. (2015).

    Example:
        >>> import pyro_dvi as dvi, torch
        >>> guide = dvi.MeanFieldGuide(dvi.to_bayesian_(torch.nn.Linear(3, 2)))
        >>> guide.initialize(torch.ones(1, 3))
        >>> signal_to_noise(guide).get_ylabel()
        'share of weights below'
    """
    given = guide if isinstance(guide, SignalToNoise) else diagnostics.signal_to_noise(guide)
    sites = {name: np.sort(ratio, axis=None) for name, ratio in given.ratios.items()}
    everything = np.sort(np.concatenate(list(sites.values())))
    positive = everything[everything > 0]
    # A few tiny ratios would press all others to the right.
    low = min(1.0, np.quantile(positive, 0.002)) if len(positive) else 0.1
    high = max(1.0, everything[-1])
    ax = own_axes(ax, figsize=(5.4, 3.8))
    levels = np.geomspace(low / 1.3, high * 1.3, POINTS)

    def draw(ratio: np.ndarray, name: str | None, **style: Any) -> None:
        ax.plot(levels, np.searchsorted(ratio, levels) / len(ratio), label=name, **style)

    few = len(sites) <= NUM_COLORS
    for k, (name, ratio) in enumerate(sites.items()):
        if few:
            label = f"{shortened(name, 28)} ({len(ratio):,})"
            draw(ratio, label, color=color(ax, k), linestyle=LINES[k], linewidth=1.2)
        else:
            draw(ratio, None if k else f"each of {len(sites)} sites", color=quiet(ax, 0.4), linewidth=0.8)
    draw(everything, f"all weights ({len(everything):,})", color=rcParams["text.color"], linewidth=2.5)
    ax.axvline(1, color=quiet(ax), linestyle=":", linewidth=1)
    ax.set_title(f"{given.prunable(1.0):.1%} below 1", loc="right", fontsize="medium")
    log_axis(ax, low / 1.3, high * 1.3)
    ax.set(ylim=(0, 1), xlabel="|mean| / sd of a weight", ylabel="share of weights below")
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.legend(fontsize="small", frameon=False, loc="upper left")
    return ax
