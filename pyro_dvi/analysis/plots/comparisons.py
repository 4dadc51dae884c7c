# SPDX-License-Identifier: Apache-2.0
"""Plots that compare: several methods by their metrics, and propagated moments with draws of the weights."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from pyro_dvi.analysis.plots.style import (
    VERMILLION,
    blue,
    column,
    dots,
    log_axis,
    name_rows,
    own_axes,
    own_panels,
    quiet,
    row_size,
    split_off,
)
from pyro_dvi.errors import DataError
from pyro_dvi.predictive.metrics import Estimate

ERROR = "_standard_error"

# Metrics whose better direction is known, by the beginning of their name.
_LOWER = tuple("nll rmse brier ece crps aumrc fpr error loss width seconds".split())
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
        results: for each method by name a :class:`~pyro_dvi.predictive.Prediction` with observations, a mapping from
            metrics to numbers (an estimate with its standard error, or a number with ``<metric>_standard_error``
            beside it), or a sequence of either, one for each run. A mapping may also hold a sequence of numbers.
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


def _panel(ax: Axes, metric: str, scores: Mapping[str, tuple[np.ndarray, float]]) -> None:
    """Draw one metric: its values in the runs of each method, and the standard error of their mean."""
    values = np.array([runs.mean() for runs, _ in scores.values()])
    errors = np.nan_to_num([error for _, error in scores.values()])
    places, main = np.arange(len(values)), blue(ax)
    lower = metric.lower().startswith(_LOWER)
    known = lower or metric.lower().startswith(_HIGHER)
    best = (values == (values.min() if lower else values.max())) & known
    style: dict[str, Any] = {
        "color": main,
        "linestyle": "none",
        "elinewidth": 1.5,
        "marker": "o",
        "zorder": 3,
    }
    for chosen, face in ((~best, ax.get_facecolor()), (best, main)):
        own = {"xerr": errors[chosen], "markerfacecolor": face, "markersize": 5.5}
        ax.errorbar(values[chosen], places[chosen], **own, **style)
    for place, (runs, _) in enumerate(scores.values()):
        if len(runs) > 1:
            ticks: dict[str, Any] = {"linestyle": "none", "marker": "|", "markersize": 5}
            ax.plot(runs, [place + 0.25] * len(runs), color=quiet(ax), **ticks)
    if best.any() and len(values) > 1:
        ax.axvline(float(values[best][0]), color=quiet(ax), linestyle="--", linewidth=0.8, zorder=0)
    direction = f" ({'lower' if lower else 'higher'} is better)" if known else ""
    ax.set_title(metric.replace("_", " ") + direction, loc="left", fontsize="medium")
    ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.margins(x=0.12)
    name_rows(ax, list(scores))


def _runs(name: str, given: Any) -> list[Mapping[str, Any]]:
    """Return the metrics of each run of a method."""
    if isinstance(given, Sequence) and not isinstance(given, str) and given:
        return [row for part in given for row in _runs(name, part)]
    if isinstance(given, Mapping):
        return [given]
    if callable(getattr(given, "metrics", None)):
        return [given.metrics()]
    raise DataError(
        f"the results of {name!r} are a Prediction, a mapping of metrics, or runs of these, not {given!r}"
    )


def _score(name: str, rows: list[Mapping[str, Any]], metric: str) -> tuple[np.ndarray, float]:
    """Return the values of a metric in all runs, and the standard error of their mean, NaN if it is not known."""
    if any(metric not in row for row in rows):
        known = [list(row) for row in rows]
        raise DataError(f"method {name!r} has no metric {metric!r} in some run; its runs have {known}")
    first = rows[0][metric]
    values = [
        np.atleast_1d(
            float(row[metric]) if isinstance(row[metric], Estimate) else column(row[metric], metric)
        )
        for row in rows
    ]
    runs = np.concatenate(values)
    if len(runs) > 1:
        return runs, float(np.std(runs, ddof=1) / np.sqrt(len(runs)))
    error = first.standard_error if isinstance(first, Estimate) else rows[0].get(metric + ERROR, np.nan)
    return runs, float(error)


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
        >>> import pyro_dvi as dvi, torch
        >>> guide = dvi.MeanFieldGuide(
        ...     model := dvi.classifier(dvi.to_bayesian_(torch.nn.Linear(2, 3)), 4)
        ... )
        >>> guide(x := torch.ones(4, 2), torch.arange(4) % 3) and None
        >>> moment_comparison(
        ...     dvi.diagnostics.compare_with_sampling(model, guide, x, num_samples=9)
        ... ).get_xscale()
        'log'
    """
    if not report.rows:
        raise DataError("the report has no layers to plot")
    layers, ratios, errors = report["layer"], np.array(report["sd_ratio"]), np.array(report["mean_error"])
    names = [
        f"{row['layer']}  {row['class']}" if row["layer"] != row["class"] else row["layer"]
        for row in report.rows
    ]
    is_parameter = np.array([layer.rpartition(".")[0] == report.site for layer in layers])
    ax = own_axes(ax, figsize=(7.0, 1.4 + 0.24 * len(layers)))
    grey = quiet(ax)
    beside = split_off(ax, "the errors", below=False)
    size = row_size(ax, len(layers), 5)
    for panel, numbers, shade in ((ax, ratios, blue(ax)), (beside, errors, VERMILLION)):
        panel.plot(numbers, np.arange(len(layers)), color=shade, linewidth=1, alpha=0.5)
        dots(panel, numbers, is_parameter, (None, None), color=shade, markersize=size)
    shown = np.append(ratios[(ratios > 0) & np.isfinite(ratios)], [0.5, 2.0])
    log_axis(ax, shown.min() / 1.15, shown.max() * 1.15)
    ax.axvline(1, color=grey, linestyle="--", linewidth=1, zorder=0)
    ax.set_xlabel("sd, propagated\n/ sampled")
    name_rows(ax, names)
    beside.axvspan(0, report.chance, color=grey, alpha=0.2, linewidth=0)
    beside.set_xlim(0, 1.15 * max(2 * report.chance, errors.max()))
    beside.grid(axis="y", color=grey, alpha=0.15)
    beside.set_xlabel("error of the\nmean / sd")
    beside.tick_params(axis="y", labelleft=False, length=0)
    beside.xaxis.set_major_locator(MaxNLocator(3))
    return ax
