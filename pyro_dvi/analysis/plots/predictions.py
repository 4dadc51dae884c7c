# SPDX-License-Identifier: Apache-2.0
"""Plots of predictions: regression bands, calibration, rejection curves, and metrics of several methods.

The colours are ``"C0"``, ``"C1"``, ... of the user's style. They are combined with line styles, so that no meaning
depends on colour alone. Reference lines are grey, which is visible on white and on black. Nothing here changes
``rcParams``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.legend import Legend
from matplotlib.ticker import MaxNLocator, PercentFormatter

from pyro_dvi.errors import DataError, UnsupportedError
from pyro_dvi.predictive import metrics
from pyro_dvi.predictive.metrics import Estimate

GREY = "gray"
FEW = 5  # bins with fewer examples are drawn as open circles
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))


def regression_band(
    x: Any, prediction: Any, *, data: tuple[Any, Any] | None = None, ax: Axes | None = None
) -> Axes:
    r"""Draw a regression over one input: mean, epistemic uncertainty, and total uncertainty including the noise.

    The inner band is :math:`m \pm 2\,\mathrm{sd}`, with the standard deviation of the function (epistemic). The outer
    band, with a dashed edge, is :math:`m \pm 2\,\mathrm{sd}`, with the standard deviation of the observation (from the
    total variance).

    Args:
        x: the input of each prediction, shape ``[N]`` or ``[N, 1]``, in any order. If the model has several inputs,
            pass one column.
        prediction: a :class:`~pyro_dvi.predictive.Prediction`, or a mapping with ``mean`` and, if known, ``epistemic``
            and ``variance`` (of the observation, in squared units), each of shape ``[N]`` or ``[N, 1]``. If the model
            has several outputs, pass one of them in a mapping.
        data: observed ``(x, y)`` to show as points.
        ax: axes to draw into.

    Returns:
        The axes.

    Raises:
        DataError: if the mean is missing, values are NaN, or the numbers of predictions and inputs differ.

    Source: Depeweg et al. (2018), section 3, for the decomposition.

    Example:
        >>> ax = regression_band(
        ...     [0.0, 1.0], {"mean": [0.0, 1.0], "variance": [0.1, 0.2]}, data=([0.5], [0.4])
        ... )
        >>> ax.get_legend_handles_labels()[1]
        ['observation, ±2 sd', 'mean', 'data (1)']
    """
    places = column(x, "x")
    order = np.argsort(places, kind="stable")
    mean, total, epistemic = (_numbers(prediction, name, order) for name in ("mean", "variance", "epistemic"))
    mean = column(mean, "the mean of the prediction")
    ax, places = ax or _new_axes(5.4, 3.8), places[order]
    for variance, alpha, name in ((total, 0.15, "observation"), (epistemic, 0.4, "function")):
        if variance is not None:
            low, high = mean - 2 * np.sqrt(variance), mean + 2 * np.sqrt(variance)
            ax.fill_between(places, low, high, color="C0", alpha=alpha, linewidth=0, label=f"{name}, ±2 sd")
            if name == "observation":
                ax.plot(places, np.stack([low, high], 1), "--", color="C0", linewidth=0.8, alpha=0.7)
    ax.plot(places, mean, color="C1", label="mean")
    if data is not None:
        inputs, targets = column(data[0], "x of the data"), column(data[1], "y of the data")
        size, alpha = (1.5, 0.4) if len(inputs) > 300 else (4, 0.6)
        points: dict[str, Any] = {"markersize": size, "alpha": alpha, "markeredgewidth": 0, "zorder": 2.5}
        label = f"data ({len(inputs):,})"
        ax.plot(inputs, targets, "o", color=rcParams["text.color"], label=label, **points)
    ax.set(xlabel="x", ylabel="y")
    ax.margins(x=0.02)
    _legend_above(ax, ncols=2)
    return ax


def _numbers(prediction: Any, name: str, order: np.ndarray) -> np.ndarray | None:
    """Return one value per input, in the order of the inputs, or None if the prediction does not have them."""
    try:
        given = prediction.get(name) if isinstance(prediction, Mapping) else getattr(prediction, name, None)
    except UnsupportedError:
        given = None
    if given is None:
        return None
    numbers = column(given, name)
    if len(numbers) != len(order):
        raise DataError(f"{name} has {len(numbers)} values for {len(order)} values of x: pass one for each")
    return numbers[order]


def _of_classes(prediction: Any, labels: Any, name: str = "") -> tuple[Any, Any]:
    """Return class probabilities and their labels, without masked examples.

    Args:
        prediction: probabilities, or a :class:`~pyro_dvi.predictive.Prediction` of classes.
        labels: observed classes; None for the labels that came with the prediction.
        name: name of the method, for error messages.

    Raises:
        DataError: if there are no labels.
        UnsupportedError: for a regression.
    """
    is_prediction = hasattr(prediction, "probabilities")
    observed = prediction.observed if labels is None and is_prediction else labels
    if observed is None:
        raise DataError(
            f"the predictions{name and f' of {name!r}'} have no labels: pass labels, or predict from (x, labels)"
        )
    if not is_prediction:
        return prediction, observed
    p, mask = prediction.probabilities, prediction.mask
    observed = torch.as_tensor(observed, device=p.device)
    if prediction.is_one_hot:
        mask = None if mask is None else mask.any(-1)
        observed = observed.argmax(-1) if observed.shape == p.shape else observed
    return (p, observed) if mask is None else (p[mask], observed[mask])


def reliability_diagram(
    probabilities: Any,
    labels: Any = None,
    *,
    num_bins: int = 15,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    r"""Draw accuracy against confidence, and below it the number of examples in each bin.

    Points on the diagonal are calibrated; points below it are overconfident. The grey bars show the gaps between
    accuracy and confidence; their mean, weighted by the number of examples, is the expected calibration error, which is
    shown in the title. Error bars extend one binomial standard error, :math:`\sqrt{a(1-a)/n_b}`. Open circles are bins
    with fewer than five examples. The bins are those of :func:`~pyro_dvi.predictive.metrics.reliability_table`.

    Args:
        probabilities: class probabilities ``[..., C]``; or probabilities of label 1, ``[...]``; or a
            :class:`~pyro_dvi.predictive.Prediction` of classes.
        labels: observed classes ``0..C-1``, shape ``[...]``; by default the labels of the prediction.
        num_bins: number of bins of equal width between 0 and 1.
        title: title of the axes.
        ax: axes to draw into, part of a grid created with ``plt.subplots``; the counts occupy the lower part of these
            axes.

    Returns:
        The axes of the diagram; the axes of the counts are the last axes of the figure, ``ax.figure.axes[-1]``.

    Raises:
        ArgumentError: if there is less than one bin, or the axes are not part of a grid.
        DataError: if probabilities or labels are invalid or missing.
        UnsupportedError: for a regression.

    Source: DeGroot & Fienberg (1983); Niculescu-Mizil & Caruana (2005).

    Example:
        >>> ax = reliability_diagram([[0.9, 0.1], [0.4, 0.6]], [0, 0])
        >>> ax.get_ylabel()
        'accuracy'
    """
    probabilities, labels = _of_classes(probabilities, labels)
    table = metrics.reliability_table(probabilities, labels, num_bins)
    error = metrics.expected_calibration_error(probabilities, labels, num_bins)
    count, width = table.count.numpy(), 1 / num_bins
    middles, filled, few = table.edges.numpy()[:-1] + width / 2, count > 0, (count > 0) & (count < FEW)
    confidence, accuracy = table.confidence.numpy(), table.accuracy.numpy()

    ax = ax or _new_axes(4.2, 5.0)
    place: Any = ax.get_subplotspec()
    figure: Any = ax.get_figure(root=False)
    cells = place.subgridspec(2, 1, height_ratios=[3.2, 1], hspace=0.06)
    ax.set_subplotspec(cells[0])
    counts = figure.add_subplot(cells[1], sharex=ax)

    ax.plot([0, 1], [0, 1], color=GREY, linestyle="--", linewidth=1)
    gaps = (accuracy - confidence)[filled]
    ax.bar(middles[filled], gaps, width, bottom=confidence[filled], color=GREY, alpha=0.25, linewidth=0)
    for chosen, style in (
        (filled & ~few, {"fmt": "o-"}),
        (few, {"fmt": "o", "alpha": 0.5, "markerfacecolor": "none"}),
    ):
        right = accuracy[chosen]
        spread = np.sqrt(right * (1 - right) / count[chosen])
        options: dict[str, Any] = {"color": "C0", "elinewidth": 1, "markersize": 4, **style}
        ax.errorbar(confidence[chosen], right, spread, **options)
    ax.set(xlim=(0, 1), ylim=(0, 1.02), ylabel="accuracy")
    ax.set_title(title, loc="left", fontsize="medium", fontweight="bold")
    ax.set_title(f"ECE {error:.1%}", loc="right", fontsize="medium")
    ax.tick_params(labelbottom=False)
    counts.bar(middles, count / count.sum(), width=width * 0.9, color="C0")
    counts.set(xlabel=f"confidence ({count.sum():,} examples)", ylabel="share", xlim=(0, 1))
    counts.yaxis.set_major_locator(MaxNLocator(3, prune="upper"))
    for axis in (ax.yaxis, counts.yaxis, counts.xaxis):
        axis.set_major_formatter(PercentFormatter(1))
    return ax


def rejection_curve(
    predictions: Any,
    labels: Any = None,
    *,
    uncertainty: Any = None,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    r"""Draw the selective risk: the error of the predictions that remain when the most uncertain ones are rejected.

    The shaded area in the colour of each curve is a lower bound. It is reached by an oracle that rejects wrong
    predictions first: at the rejected fraction r, the error of the oracle is :math:`\max(0, (e - r)/(1 - r))`. The thin
    line is the error e of an uninformative ranking. The legend shows the area under the curve,
    :func:`~pyro_dvi.predictive.metrics.aumrc`; lower is better.

    Args:
        predictions: class probabilities ``[N, C]``, or ``[N]`` for the probabilities of label 1; or a
            :class:`~pyro_dvi.predictive.Prediction`; or a mapping from names of methods to either.
        labels: observed classes ``[N]``; by default the labels of the predictions.
        uncertainty: values ``[N]`` that rank the examples; the highest are rejected first. If ``predictions`` is a
            mapping, this is a mapping with the same names. By default, the predictive entropy.
        title: title of the axes.
        ax: axes to draw into.

    Returns:
        The axes.

    Raises:
        DataError: if probabilities, labels or uncertainties are invalid, or missing for a method.

    Source: Schmitt & Roth (2021), appendix D.

    Example:
        >>> ax = rejection_curve([[0.9, 0.1], [0.6, 0.4]], [0, 1])
        >>> ax.get_legend_handles_labels()[1]
        ['AUMRC 0.250']
    """
    methods = predictions if isinstance(predictions, Mapping) else {"": predictions}
    ranks = uncertainty if isinstance(uncertainty, Mapping) else dict.fromkeys(methods, uncertainty)
    ax = ax or _new_axes(5.0, 3.8)
    highest = 0.0
    for k, (name, prediction) in enumerate(methods.items()):
        p, y = _of_classes(prediction, labels, name)
        curve = metrics.rejection_curve(p, y, ranks[name])
        area = f"AUMRC {metrics.aumrc(p, y, ranks[name]):.3f}"
        rejected, errors, color = curve.rejected.numpy(), curve.error.numpy(), f"C{k}"
        line: dict[str, Any] = {"color": color, "linestyle": LINES[k % len(LINES)], "zorder": 3}
        ax.plot(rejected, errors, label=f"{name}: {area}" if name else area, **line)
        # The error is zero at the last point.
        oracle = np.clip(errors[0] - rejected, 0, None) / np.maximum(1 - rejected, 1e-12)
        ax.fill_between(rejected, oracle, color=color, alpha=0.12, linewidth=0)
        ax.axhline(errors[0], color=color, linewidth=0.6, alpha=0.7, zorder=1)
        highest = max(highest, errors.max())
    ax.set(xlim=(0, 1), ylim=(0, 1.08 * highest or 0.1), xlabel="rejected share", ylabel="selective risk")
    ax.set_title(title, loc="left", fontsize="medium", fontweight="bold")
    ax.xaxis.set_major_formatter(PercentFormatter(1))
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    ax.yaxis.set_major_locator(MaxNLocator(5))
    legend = _legend_above(ax, 1.08 if title else 1, alignment="left")
    legend.set_title("thin: random rejection; shaded: below an oracle")
    legend.get_title().set_fontsize("x-small")
    return ax


def column(values: Any, name: str) -> np.ndarray:
    """Return ``values`` as a flat array of doubles.

    Raises:
        DataError: if there are no values, or some are not finite.
    """
    if hasattr(values, "detach"):
        values = values.detach().cpu().double()
    numbers = np.asarray(values, dtype=float).ravel()
    if not numbers.size or not np.isfinite(numbers).all():
        raise DataError(f"{name} is empty, or contains values that are NaN or infinite")
    return numbers


def _new_axes(width: float, height: float) -> Axes:
    return plt.subplots(figsize=(width, height), layout="constrained")[1]


def _legend_above(ax: Axes, height: float = 1.0, **options: Any) -> Legend:
    """Put a frameless, left-aligned legend above ``ax``, at ``height`` times the height of ``ax``."""
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, height), "borderaxespad": 0.2}
    return ax.legend(fontsize="small", frameon=False, **place, **options)


ERROR = "_standard_error"

# Prefixes of metrics for which lower or higher values are known to be better.
_LOWER = tuple("nll rmse brier ece adaptive_ece crps aumrc fpr error loss width seconds".split())
_HIGHER = ("accuracy", "auroc", "log_likelihood", "lppd", "elpd")


def compare(
    results: Mapping[str, Any], *, metrics: Sequence[str] | None = None, axes: Sequence[Axes] | None = None
) -> np.ndarray:
    r"""Draw metrics of several methods with their standard errors: one row per method, one panel per metric.

    Error bars extend one standard error over test examples to each side, if the metric has one. In each panel, the best
    method is shown as a filled dot with a dashed line through it. The title states whether lower or higher is better,
    if known. The errors of methods on the same test data are correlated, so a paired difference can be significant even
    if the error bars overlap.

    Args:
        results: for each method name, a :class:`~pyro_dvi.predictive.Prediction` with observations; or a mapping from
            metrics to numbers (an estimate with its standard error, or a number with a separate
            ``<metric>_standard_error``).
        metrics: metrics to draw, in this order; by default all metrics that every method has.
        axes: axes to draw into, one for each metric.

    Returns:
        Array of the axes, one for each metric.

    Raises:
        ValueError: if the numbers of axes and metrics differ.
        DataError: if a metric of a method is not finite.

    Example:
        >>> axes = compare({"MAP": {"nll": 0.5, "nll_standard_error": 0.1}, "VL": {"nll": 0.3}})
        >>> [ax.get_title("left") for ax in axes]
        ['nll (lower is better)']
    """
    rows = {name: own if isinstance(own, Mapping) else own.metrics() for name, own in results.items()}
    if metrics is None:
        metrics = [m for row in rows.values() for m in row if not m.endswith(ERROR)]
        metrics = [m for m in dict.fromkeys(metrics) if all(m in row for row in rows.values())]
    drawn = _panels(axes, metrics, height=0.9 + 0.3 * len(rows))
    for ax, metric in zip(drawn, metrics, strict=True):
        _panel(ax, metric, rows)
    return drawn


def _panel(ax: Axes, metric: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw one metric of all methods, with its standard errors."""
    values = column([float(row[metric]) for row in rows.values()], metric)
    errors = np.nan_to_num([_error(row, metric) for row in rows.values()])
    places = np.arange(len(values))
    lower = metric.lower().startswith(_LOWER)
    known = lower or metric.lower().startswith(_HIGHER)
    best = (values == (values.min() if lower else values.max())) & known
    for chosen, face in ((~best, ax.get_facecolor()), (best, "C0")):
        dots: dict[str, Any] = {"color": "C0", "markerfacecolor": face, "elinewidth": 1.5, "zorder": 3}
        ax.errorbar(values[chosen], places[chosen], xerr=errors[chosen], fmt="o", **dots)
    if best.any() and len(values) > 1:
        ax.axvline(float(values[best][0]), color=GREY, linestyle="--", linewidth=0.8, zorder=0)
    direction = f" ({'lower' if lower else 'higher'} is better)" if known else ""
    ax.set_title(metric.replace("_", " ") + direction, loc="left", fontsize="medium")
    ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.margins(x=0.12)
    ax.set_yticks(places, list(rows), fontsize="small")
    ax.set_ylim(len(values) - 0.5, -0.5)


def _error(row: Mapping[str, Any], metric: str) -> float:
    """Return the standard error of a metric; NaN if unknown."""
    value = row[metric]
    return value.standard_error if isinstance(value, Estimate) else float(row.get(metric + ERROR, np.nan))


def _panels(axes: Sequence[Axes] | None, names: Sequence[str], height: float) -> np.ndarray:
    """Return one axes object per name: ``axes``, or those of a new figure with panels of the given height."""
    drawn = np.asarray(axes, dtype=object).ravel()
    if axes is None:
        wide = min(len(names), 2 if len(names) == 4 else 3)
        high = -(-len(names) // wide)
        options: dict[str, Any] = {"figsize": (3.1 * wide, height * high), "layout": "constrained"}
        _, grid = plt.subplots(high, wide, squeeze=False, sharey=True, **options)
        for unused in grid.ravel()[len(names) :]:
            unused.remove()
        drawn = grid.ravel()[: len(names)]
    return drawn
