# SPDX-License-Identifier: Apache-2.0
"""Plots with one panel per metric, to compare methods, or one panel per setting, to compare settings."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from pyro_dvi.analysis.plots.predictions import GREY, column
from pyro_dvi.analysis.tuning import Tuned, are_numbers
from pyro_dvi.errors import ArgumentError, DataError
from pyro_dvi.predictive.metrics import Estimate

ERROR = "_standard_error"

# Prefixes of metrics for which lower or higher values are known to be better.
_LOWER = tuple("nll rmse brier ece adaptive_ece crps aumrc fpr error loss width seconds".split())
_HIGHER = ("accuracy", "auroc", "log_likelihood", "lppd", "elpd")


def compare(
    results: Mapping[str, Any], *, metrics: Sequence[str] | None = None, axes: Sequence[Axes] | None = None
) -> np.ndarray:
    r"""Draw metrics of several methods with their standard errors: one row per method, one panel per metric.

    Error bars extend one standard error to each side. For a single run, this is the metric's standard error over test
    examples, if it has one. For several runs (seeds), the dot is the mean, the error bar is the standard deviation
    divided by the square root of the number of runs, and each run is a small tick. In each panel, the best method is
    shown as a filled dot with a dashed line through it. The title states whether lower or higher is better, if known.
    The errors of methods on the same test data are correlated, so a paired difference can be significant even if the
    error bars overlap.

    Args:
        results: for each method name, a :class:`~pyro_dvi.predictive.Prediction` with observations; or a mapping from
            metrics to numbers (an estimate with its standard error, or a number with a separate
            ``<metric>_standard_error``); or a sequence of either, with one element per run.
        metrics: metrics to draw, in this order; by default all metrics that every method has.
        axes: axes to draw into, one for each metric.

    Returns:
        Array of the axes, one for each metric.

    Raises:
        ArgumentError: if the numbers of axes and metrics differ.
        DataError: if there are no results, or a metric of a method is not finite.

    Example:
        >>> axes = compare({"MAP": {"nll": 0.5, "nll_standard_error": 0.1}, "VL": {"nll": 0.3}})
        >>> [ax.get_title("left") for ax in axes]
        ['nll (lower is better)']
    """
    runs = {name: _runs(given) for name, given in results.items()}
    every = [row for rows in runs.values() for row in rows]
    if metrics is None and every:
        metrics = [m for m in every[0] if not m.endswith(ERROR) and all(m in row for row in every)]
    if not metrics:
        raise DataError(f"the methods have no metric in common: {[list(row) for row in every]}")
    drawn = _panels(axes, metrics, height=0.9 + 0.3 * len(runs))
    for ax, metric in zip(drawn, metrics, strict=True):
        _panel(ax, metric, {name: _score(name, rows, metric) for name, rows in runs.items()})
    return drawn


def tuning(tuned: Tuned, *, axes: Sequence[Axes] | None = None) -> np.ndarray:
    r"""Draw the validation score against each setting of :func:`~pyro_dvi.tune`, with one panel per setting.

    The line connects the training runs that differ from the chosen run in this setting only. Error bars show one paired
    standard error of the difference from the lowest score. Grey dots are all other runs, and the dashed line is the
    chosen value. Axes of positive numbers are logarithmic.

    Args:
        tuned: result of ``tune``.
        axes: axes to draw into, one for each setting.

    Returns:
        Array of the axes, one for each setting.

    Raises:
        ArgumentError: if the numbers of axes and settings differ.

    Example:
        >>> from pyro_dvi.training.history import Table
        >>> table = Table(
        ...     lr=[0.1, 1], score=[3.0, 2], standard_error=[1.0, 1], paired_standard_error=[0.5, 0]
        ... )
        >>> axes = tuning(Tuned({"lr": 1}, None, None, table, {}))
        >>> [ax.get_xlabel() for ax in axes], axes[0].get_xscale()
        (['lr'], 'log')
    """
    table, names = tuned.table, list(tuned.settings)
    known = [row for row, score in enumerate(table["score"]) if score == score]
    scores, bars = (
        np.array([table[column][row] for row in known]) for column in ("score", "paired_standard_error")
    )
    drawn = _panels(axes, names, height=2.4)
    for ax, name in zip(drawn, names, strict=True):
        values: list[Any] = [table[name][row] for row in known]
        chosen = tuned.settings[name]
        on_line = [all(table[o][row] == tuned.settings[o] for o in names if o != name) for row in known]
        if not are_numbers([*values, chosen]):
            values, chosen = [str(value) for value in values], str(chosen)
        elif min(values) > 0:
            ax.set_xscale("log")
        line = [k for k, is_on in enumerate(on_line) if is_on]
        ax.plot(values, scores, "o", color=GREY, markersize=3)
        ax.errorbar(
            [values[k] for k in line],
            scores[line],
            np.nan_to_num(bars[line]),
            fmt="o-",
            elinewidth=1.5,
            zorder=3,
        )
        ax.axvline(chosen, color=GREY, linestyle="--", linewidth=0.8, zorder=0)
        ax.set_xlabel(name)
    drawn[0].set_ylabel("validation score")
    return drawn


def _panel(ax: Axes, metric: str, scores: Mapping[str, tuple[np.ndarray, float]]) -> None:
    """Draw one metric: for each method, the values of its runs and the standard error of their mean."""
    values = np.array([runs.mean() for runs, _ in scores.values()])
    errors = np.nan_to_num([error for _, error in scores.values()])
    places = np.arange(len(values))
    lower = metric.lower().startswith(_LOWER)
    known = lower or metric.lower().startswith(_HIGHER)
    best = (values == (values.min() if lower else values.max())) & known
    for chosen, face in ((~best, ax.get_facecolor()), (best, "C0")):
        dots: dict[str, Any] = {"color": "C0", "markerfacecolor": face, "elinewidth": 1.5, "zorder": 3}
        ax.errorbar(values[chosen], places[chosen], xerr=errors[chosen], fmt="o", **dots)
    for place, (runs, _) in enumerate(scores.values()):
        if len(runs) > 1:
            ax.plot(runs, [place + 0.25] * len(runs), "|", color=GREY, markersize=5)
    if best.any() and len(values) > 1:
        ax.axvline(float(values[best][0]), color=GREY, linestyle="--", linewidth=0.8, zorder=0)
    direction = f" ({'lower' if lower else 'higher'} is better)" if known else ""
    ax.set_title(metric.replace("_", " ") + direction, loc="left", fontsize="medium")
    ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.margins(x=0.12)
    ax.set_yticks(places, list(scores), fontsize="small")
    ax.set_ylim(len(values) - 0.5, -0.5)


def _runs(given: Any) -> list[Mapping[str, Any]]:
    """Return the metrics of each run of a method."""
    if isinstance(given, (list, tuple)):
        return [row for part in given for row in _runs(part)]
    if isinstance(given, Mapping):
        return [given]
    return [given.metrics()]


def _score(name: str, rows: list[Mapping[str, Any]], metric: str) -> tuple[np.ndarray, float]:
    """Return the values of a metric in all runs, and the standard error of their mean (NaN if unknown)."""
    values = column([float(row[metric]) for row in rows], f"{metric} of {name!r}")
    if len(values) > 1:
        return values, float(values.std(ddof=1) / np.sqrt(len(values)))
    first = rows[0][metric]
    error = first.standard_error if isinstance(first, Estimate) else rows[0].get(metric + ERROR, np.nan)
    return values, float(error)


def _panels(axes: Sequence[Axes] | None, names: Sequence[str], height: float) -> np.ndarray:
    """Return one axes object per name: ``axes``, or those of a new figure with panels of the given height.

    Raises:
        ArgumentError: if the numbers of axes and names differ.
    """
    drawn = np.asarray(axes, dtype=object).ravel()
    if axes is None:
        wide = min(len(names), 2 if len(names) == 4 else 3)
        high = -(-len(names) // wide)
        options: dict[str, Any] = {"figsize": (3.1 * wide, height * high), "layout": "constrained"}
        _, grid = plt.subplots(high, wide, squeeze=False, sharey=True, **options)
        for unused in grid.ravel()[len(names) :]:
            unused.remove()
        drawn = grid.ravel()[: len(names)]
    if len(drawn) != len(names):
        raise ArgumentError(f"there are {len(names)} panels {list(names)}, but {len(drawn)} axes")
    return drawn
