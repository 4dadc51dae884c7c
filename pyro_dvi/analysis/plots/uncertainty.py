# SPDX-License-Identifier: Apache-2.0
r"""What does a regression know, and where?

Are foreign inputs noticed?
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from pyro_dvi.analysis.plots.style import (
    LINES,
    VERMILLION,
    blue,
    color,
    column,
    legend_above,
    own_axes,
    quiet,
    shortened,
)
from pyro_dvi.core.arguments import check_count
from pyro_dvi.errors import ArgumentError, DataError, UnsupportedError
from pyro_dvi.predictive import metrics

WIDTH = 2.0  # standard deviations


def regression_band(
    x: Any,
    prediction: Any,
    *,
    data: tuple[Any, Any] | None = None,
    output: int | None = None,
    width: float = WIDTH,
    ax: Axes | None = None,
) -> Axes:
    r"""Draw a regression over one input: mean, what more data could tell, and the noise on top.

    The inner band is :math:`m \pm k\,\mathrm{sd}` of the function (epistemic), the outer one of the observation, the
    root of the total variance. The two are told apart by shade and by the outer's dashed edge.

    Args:
        x: the input of each prediction, shape ``[N]`` or ``[N, 1]``, in any order; of several inputs, one column.
        prediction: a :class:`~pyro_dvi.predictive.Prediction`, or a mapping with ``mean`` and, as far as known, ``epistemic`` and
            ``variance`` (of the observation), of shape ``[N]`` or ``[N, outputs]``, the latter two in squared units.
        data: observed ``(x, y)`` to show as points.
        output: which one of several outputs.
        width: k, half the width of the bands.
        ax: axes to draw into.

    Returns:
        The axes.

    Raises:
        ArgumentError: several outputs and no choice, or a width that is not positive.
        DataError: lengths that differ, negative variances, or NaN.

    Source: the decomposition is that of Depeweg et al. (2018), section 3.

    Example:
        >>> ax = regression_band(
        ...     [0.0, 1.0], {"mean": [0.0, 1.0], "variance": [0.1, 0.2]}, data=([0.5], [0.4])
        ... )
        >>> ax.get_legend_handles_labels()[1]
        ['observation, ±2 sd', 'mean', 'data (1)']
    """
    if not (isinstance(width, (int, float)) and width > 0):
        raise ArgumentError(f"width is a positive number of standard deviations, got {width!r}")
    places = column(x, "x")
    order = np.argsort(places, kind="stable")
    mean = _of_output(prediction, "mean", len(places), output)
    if mean is None:
        raise DataError(
            "prediction has no mean: pass a Prediction of numbers, or {'mean': ..., 'variance': ...}"
        )
    total = _of_output(prediction, "variance", len(places), output)
    epistemic = _of_output(prediction, "epistemic", len(places), output)
    ax = own_axes(ax, figsize=(5.4, 3.8))
    places, mean = places[order], mean[order]
    main = blue(ax)
    for variance, alpha, what in ((total, 0.15, "observation"), (epistemic, 0.4, "function")):
        if variance is None:
            continue
        sd = width * np.sqrt(variance[order])
        label = f"{what}, ±{width:g} sd"
        if len(places) == 1:  # a band of no width
            thick = 1.0 if variance is total else 4.0
            ax.vlines(places, mean - sd, mean + sd, color=main, alpha=0.6, label=label, linewidth=thick)
            continue
        ax.fill_between(places, mean - sd, mean + sd, color=main, alpha=alpha, linewidth=0, label=label)
        if variance is total:
            for edge in (mean - sd, mean + sd):
                ax.plot(places, edge, color=main, linewidth=0.8, linestyle="--", alpha=0.7)
    ax.plot(places, mean, color=VERMILLION, label="mean", marker="o" if len(places) == 1 else None)
    if data is not None:
        _draw_data(ax, *data)
    ax.set(xlabel="x", ylabel="y")
    ax.margins(x=0.02)
    legend_above(ax, ncols=2)
    return ax


def _draw_data(ax: Axes, x: Any, y: Any) -> None:
    inputs, targets = column(x, "x of the data"), column(y, "y of the data")
    if len(inputs) != len(targets):
        raise DataError(f"the data have {len(inputs)} values of x and {len(targets)} of y")
    marker, size, alpha = (".", 2.5, 0.4) if len(inputs) > 300 else ("o", 4, 0.7)
    ax.plot(
        inputs,
        targets,
        linestyle="none",
        marker=marker,
        markersize=size,
        color=quiet(ax, 0.85),
        markeredgewidth=0,
        alpha=alpha,
        label=f"data ({len(inputs):,})",
        zorder=2.5,
    )


def _of_output(prediction: Any, name: str, length: int, output: int | None) -> np.ndarray | None:
    """One number for each input, or None where the prediction does not know it."""
    try:
        given = prediction.get(name) if isinstance(prediction, Mapping) else getattr(prediction, name, None)
    except UnsupportedError:
        given = None
    if given is None:
        return None
    values = (
        given.detach().cpu().double().numpy() if hasattr(given, "detach") else np.asarray(given, dtype=float)
    )
    if values.ndim == 0 or len(values) != length:
        raise DataError(
            f"{name} of shape {values.shape} has to have a row for each of the {length} values of x"
        )
    values = values.reshape(length, -1)
    if output is None and values.shape[1] > 1:
        raise ArgumentError(
            f"{name} has {values.shape[1]} outputs: choose one by output=0 .. {values.shape[1] - 1}"
        )
    chosen = 0 if output is None else output
    if not 0 <= chosen < values.shape[1]:
        raise ArgumentError(f"output is between 0 and {values.shape[1] - 1}, got {output!r}")
    numbers = column(values[:, chosen], name)
    if name != "mean" and (numbers < 0).any():
        raise DataError(f"{name} holds negative numbers, down to {numbers.min():.3g}: it is a variance")
    return numbers


def entropy_histogram(
    inside: Any, outside: Any, *, num_bins: int = 40, title: str | None = None, ax: Axes | None = None
) -> Axes:
    r"""Draw the predictive entropies of familiar inputs beside those of foreign ones.

    The further apart, the better foreign inputs are noticed: AUROC is the probability that a foreign input is the more
    uncertain one, FPR95 the share of foreign inputs that pass where 95 % of the familiar ones do. Both are in the
    title, or in the legend where there are several foreign sets. Histograms are shares of their own set, so that sets
    of different size can be compared. Familiar inputs are filled. A dotted line marks :math:`\log C`, if it is known.

    Args:
        inside: entropies of familiar inputs in nats, any shape, or a :class:`~pyro_dvi.predictive.Prediction` of classes. Any
            other measure of uncertainty will do.
        outside: the same of foreign inputs, or a mapping from names of data sets to them.
        num_bins: equally wide bins from zero to the largest entropy.
        title: of the axes.
        ax: axes to draw into.

    Returns:
        The axes.

    Raises:
        ArgumentError: less than one bin.
        DataError: no values, or NaN.

    Source: Hendrycks & Gimpel (2017) for AUROC; Liang, Li & Srikant (2018) for FPR95.

    Example:
        >>> ax = entropy_histogram([0.1, 0.2, 0.3], [0.3, 0.9])
        >>> ax.get_title("right")
        'AUROC 91.7%, FPR95 50.0%'
    """
    check_count("num_bins", num_bins)
    sets = outside if isinstance(outside, Mapping) else {"foreign": outside}
    if not sets:
        raise DataError("there is no foreign set to plot: the mapping is empty")
    familiar = _entropies(inside, "inside")
    foreign = {name: _entropies(values, f"outside {name!r}") for name, values in sets.items()}
    everything = np.concatenate([familiar, *foreign.values()])
    low, high = min(0.0, everything.min()), everything.max()
    num_classes = _num_classes(inside)
    if num_classes is not None:
        high = max(high, math.log(num_classes))
    edges = np.linspace(low, high if high > low else low + 1, num_bins + 1)

    ax = own_axes(ax, figsize=(5.4, 3.6))
    grey = quiet(ax, 0.7)
    name = f"familiar ({len(familiar):,})"
    shares = np.histogram(familiar, edges)[0] / len(familiar)
    ax.stairs(shares, edges, fill=True, color=grey, alpha=0.45, label=name)
    for k, (name, values) in enumerate(foreign.items()):
        score = (
            f"AUROC {metrics.auroc(familiar, values):.1%}, FPR95 {metrics.fpr_at_tpr(familiar, values):.1%}"
        )
        label = f"{shortened(name, 28)} ({len(values):,})"
        if len(foreign) == 1:
            ax.set_title(score, loc="right", fontsize="medium")
        else:
            label += f": {score}"
        shares = np.histogram(values, edges)[0] / len(values)
        ax.stairs(
            shares,
            edges,
            baseline=None,
            label=label,
            color=color(ax, k),
            linestyle=LINES[k % len(LINES)],
            linewidth=1.8,
        )
    if num_classes is not None:
        ax.axvline(math.log(num_classes), color=grey, linestyle=":", linewidth=1)
    if title:
        ax.set_title(title, loc="left", fontsize="medium", fontweight="bold")
    what = (
        "predictive entropy (nats)"
        if num_classes is None
        else "predictive entropy (nats); dotted: all classes alike"
    )
    ax.set(xlabel=what, ylabel="share of the set", ylim=(0, None))
    if len(foreign) > 1:
        legend_above(ax, 1.1 if title else 1)
    else:
        ax.legend(fontsize="small", frameon=False)
    return ax


def _entropies(values: Any, name: str) -> np.ndarray:
    return column(values.entropy if hasattr(values, "probabilities") else values, name)


def _num_classes(values: Any) -> int | None:
    """Classes of a prediction, two where there is one probability for each entropy."""
    if not hasattr(values, "probabilities"):
        return None
    p, entropy = values.probabilities, values.entropy
    return 2 if p.shape == entropy.shape else int(p.shape[-1])
