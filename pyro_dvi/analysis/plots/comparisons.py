# SPDX-License-Identifier: Apache-2.0
r"""Which of several methods is better, and is the difference more than chance?

Where do propagated moments deviate from draws?
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    own_panels,
    quiet,
    row_size,
)
from pyro_dvi.errors import DataError
from pyro_dvi.predictive.metrics.scoring import Estimate

ERROR = "_standard_error"

# Metrics whose better direction is known, by how their name starts.
_LOWER = (
    "nll",
    "rmse",
    "brier",
    "ece",
    "adaptive_ece",
    "crps",
    "aumrc",
    "fpr",
    "error",
    "loss",
    "width",
    "seconds",
)
_HIGHER = ("accuracy", "auroc", "log_likelihood", "lppd", "elpd")


def compare(
    results: Mapping[str, Any], *, metrics: Sequence[str] | None = None, axes: Sequence[Axes] | None = None
) -> np.ndarray:
    r"""Draw metrics of several methods with their standard errors: a row for each method, a panel for each metric.

    Bars are one standard error to each side. Of a single run it is that of the metric, over test examples, where it has
    one; of several runs (seeds) it is the standard deviation over runs by the root of their number, the dot is their
    mean, and each run is a small tick. The best method of each panel is a filled dot with a dashed line through it; the
    title says which direction is good, where that is known. Standard errors of methods on the same test data are
    correlated: bars that overlap do not rule out a clear difference of pairs.

    Args:
        results: by name of the method either a :class:`~pyro_dvi.predictive.Prediction` with observations, a mapping from metrics
            to numbers (:class:`~pyro_dvi.predictive.metrics.Estimate`, or a number with ``<metric>_standard_error`` beside it), or
            a sequence of either, one for each run. A mapping may also hold a sequence of numbers, one for each run.
        metrics: which ones to draw, in this order; by default all that every method has.
        axes: one for each metric.

    Returns:
        Array of the axes, one for each metric.

    Raises:
        ArgumentError: another number of axes than of metrics.
        DataError: no results, a metric that a method does not have, or no number.

    Example:
        >>> axes = compare({"MAP": {"nll": 0.5, "nll_standard_error": 0.1}, "VL": {"nll": 0.3}})
        >>> [ax.get_title("left") for ax in axes]
        ['nll (lower is better)']
    """
    if not isinstance(results, Mapping) or not results:
        raise DataError(f"results are metrics by name of the method, and at least one, not {results!r}")
    runs = {name: _runs(name, given) for name, given in results.items()}
    if metrics is None:
        every = [set(rows[0]) for rows in runs.values()]
        first = next(iter(runs.values()))[0]
        metrics = [m for m in first if not m.endswith(ERROR) and all(m in names for names in every)]
        if not metrics:
            raise DataError(
                f"the methods have no metric in common: { {n: list(r[0]) for n, r in runs.items()} }"
            )
    drawn = own_panels(
        axes,
        metrics,
        f"there are {len(metrics)} metrics",
        columns=2 if len(metrics) == 4 else 3,
        size=(2.6, 0.9 + 0.3 * len(runs)),
        margin=1.6,
        sharey=True,
    )
    for ax, metric in zip(drawn, metrics, strict=True):
        _panel(ax, metric, {name: _score(name, rows, metric) for name, rows in runs.items()})
    return drawn


@dataclass(frozen=True)
class _Score:
    value: float
    error: float  # NaN where it is not known
    runs: tuple[float, ...]


def _panel(ax: Axes, metric: str, scores: Mapping[str, _Score]) -> None:
    values = np.array([score.value for score in scores.values()])
    errors = np.nan_to_num([score.error for score in scores.values()])
    places = np.arange(len(values))
    lower = metric.lower().startswith(_LOWER)
    known = lower or metric.lower().startswith(_HIGHER)
    best = (values == (values.min() if lower else values.max())) & known
    for chosen, face in ((~best, ax.get_facecolor()), (best, blue(ax))):
        ax.errorbar(
            values[chosen],
            places[chosen],
            xerr=errors[chosen],
            color=blue(ax),
            linestyle="none",
            elinewidth=1.5,
            marker="o",
            markersize=5.5,
            markerfacecolor=face,
            zorder=3,
        )
    for place, score in zip(places, scores.values(), strict=True):
        ax.plot(
            score.runs,
            [place + 0.25] * len(score.runs),
            color=quiet(ax),
            linestyle="none",
            marker="|",
            markersize=5,
        )
    if best.any() and len(values) > 1:
        ax.axvline(float(values[best][0]), color=quiet(ax), linestyle="--", linewidth=0.8, zorder=0)
    what = metric.replace("_", " ")
    direction = f" ({'lower' if lower else 'higher'} is better)" if known else ""
    ax.set_title(what + direction, loc="left", fontsize="medium")
    ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.margins(x=0.12)
    name_rows(ax, list(scores))


def _runs(name: str, given: Any) -> list[dict[str, Any]]:
    """Metrics of each run of a method."""
    if isinstance(given, Sequence) and not isinstance(given, str):
        if not given:
            raise DataError(f"method {name!r} has no runs: its sequence is empty")
        return [row for part in given for row in _runs(name, part)]
    if isinstance(given, Mapping):
        return [dict(given)]
    if callable(getattr(given, "metrics", None)):
        return [dict(given.metrics())]
    raise DataError(
        f"the results of {name!r} are a Prediction, a mapping of metrics, or runs of these, not {given!r}"
    )


def _score(name: str, rows: list[dict[str, Any]], metric: str) -> _Score:
    missing = [k for k, row in enumerate(rows) if metric not in row]
    if missing:
        raise DataError(
            f"method {name!r} has no metric {metric!r}{f' in run {missing[0]}' if len(rows) > 1 else ''}; it has "
            f"{[m for m in rows[missing[0]] if not m.endswith(ERROR)]}"
        )
    values: list[float] = []
    for row in rows:
        value = row[metric]
        if hasattr(value, "detach"):
            value = value.detach().cpu().numpy()
        values += np.ravel(float(value) if isinstance(value, Estimate) else np.asarray(value, float)).tolist()
    if not values or not np.isfinite(values).all():
        raise DataError(f"metric {metric!r} of {name!r} has to be finite numbers, got {values}")
    if len(values) > 1:
        error = float(np.std(values, ddof=1) / np.sqrt(len(values)))
        return _Score(float(np.mean(values)), error, tuple(values))
    value = rows[0][metric]
    error = value.standard_error if isinstance(value, Estimate) else rows[0].get(metric + ERROR, np.nan)
    return _Score(values[0], float(error), ())


def moment_comparison(report: Any, *, ax: Axes | None = None) -> Axes:
    """Draw how far propagated moments are from draws of the weights, layer by layer, the first layer at the top.

    Left the ratio of standard deviations, propagated over sampled, on a logarithmic axis: below one the propagation is
    too narrow. Right the error of the means in standard deviations; what lies in the grey band is chance. Open circles
    are the parameters of the observed site.

    Args:
        report: what :func:`~pyro_dvi.diagnostics.compare_with_sampling` returned.
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
