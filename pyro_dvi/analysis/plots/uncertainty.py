# SPDX-License-Identifier: Apache-2.0
"""Plots of predictive uncertainty: bands of a regression, and entropies of in- and out-of-distribution inputs."""

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
from pyro_dvi.errors import DataError, UnsupportedError
from pyro_dvi.predictive import metrics

NUM_BINS = 40


def regression_band(
    x: Any, prediction: Any, *, data: tuple[Any, Any] | None = None, ax: Axes | None = None
) -> Axes:
    r"""Draw a regression over one input: mean, what more data could tell, and the noise on top.

    The inner band is :math:`m \pm 2\,\mathrm{sd}` of the function (epistemic), the outer one of the observation, from
    the total variance. They differ in shade, and the outer one has a dashed edge.

    Args:
        x: the input of each prediction, shape ``[N]`` or ``[N, 1]``, in any order; of several inputs, one column.
        prediction: a :class:`~pyro_dvi.predictive.Prediction`, or a mapping with ``mean`` and, where known,
            ``epistemic`` and ``variance`` (of the observation, in squared units), of shape ``[N]`` or ``[N, 1]``. Pass
            one of several outputs in a mapping.
        data: observed ``(x, y)`` to show as points.
        ax: axes to draw into.

    Returns:
        The axes.

    Raises:
        DataError: lengths that differ, negative variances, or NaN.

    Source: the decomposition is due to Depeweg et al. (2018), section 3.

    Example:
        >>> ax = regression_band(
        ...     [0.0, 1.0], {"mean": [0.0, 1.0], "variance": [0.1, 0.2]}, data=([0.5], [0.4])
        ... )
        >>> ax.get_legend_handles_labels()[1]
        ['observation, ±2 sd', 'mean', 'data (1)']
    """
    places = column(x, "x")
    order = np.argsort(places, kind="stable")
    mean, total, epistemic = (
        _numbers(prediction, name, len(places)) for name in ("mean", "variance", "epistemic")
    )
    if mean is None:
        raise DataError(
            "prediction has no mean: pass a Prediction of numbers, or {'mean': ..., 'variance': ...}"
        )
    ax = own_axes(ax, figsize=(5.4, 3.8))
    places, mean = places[order], mean[order]
    main = blue(ax)
    for variance, alpha, what in ((total, 0.15, "observation"), (epistemic, 0.4, "function")):
        if variance is not None:
            sd = 2 * np.sqrt(variance[order])
            label = f"{what}, ±2 sd"
            ax.fill_between(places, mean - sd, mean + sd, color=main, alpha=alpha, linewidth=0, label=label)
        if variance is not None and variance is total:
            for edge in (mean - sd, mean + sd):
                ax.plot(places, edge, color=main, linewidth=0.8, linestyle="--", alpha=0.7)
    ax.plot(places, mean, color=VERMILLION, label="mean")
    if data is not None:
        inputs, targets = column(data[0], "x of the data"), column(data[1], "y of the data")
        if len(inputs) != len(targets):
            raise DataError(f"the data have {len(inputs)} values of x and {len(targets)} of y")
        size, alpha = (1.5, 0.4) if len(inputs) > 300 else (4, 0.7)
        points: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": size, "alpha": alpha}
        points |= {"color": quiet(ax, 0.85), "markeredgewidth": 0, "zorder": 2.5}
        ax.plot(inputs, targets, label=f"data ({len(inputs):,})", **points)
    ax.set(xlabel="x", ylabel="y")
    ax.margins(x=0.02)
    legend_above(ax, ncols=2)
    return ax


def _numbers(prediction: Any, name: str, length: int) -> np.ndarray | None:
    """Return one number for each input, or None where the prediction does not know it."""
    try:
        given = prediction.get(name) if isinstance(prediction, Mapping) else getattr(prediction, name, None)
    except UnsupportedError:
        given = None
    if given is None:
        return None
    numbers = column(given, name)
    if len(numbers) != length:
        raise DataError(
            f"{name} has {len(numbers)} numbers, and has to have one for each of the {length} values of x"
        )
    if name != "mean" and (numbers < 0).any():
        raise DataError(f"{name} holds negative numbers, down to {numbers.min():.3g}: it is a variance")
    return numbers


def entropy_histogram(inside: Any, outside: Any, *, title: str | None = None, ax: Axes | None = None) -> Axes:
    r"""Draw the predictive entropies of familiar inputs beside those of foreign ones.

    The further apart, the better foreign inputs are noticed: AUROC is the probability that a foreign input is the more
    uncertain one, FPR95 the share of foreign inputs that pass where 95 % of the familiar ones do. Both are in the
    title, or in the legend where there are several foreign sets. Histograms are shares of their own set, so that sets
    of different size can be compared. Familiar inputs are filled. A dotted line marks :math:`\log C`, if it is known.

    Args:
        inside: entropies of familiar inputs in nats, any shape, or a
            :class:`~pyro_dvi.predictive.Prediction` of classes. Any other measure of uncertainty will do.
        outside: the same of foreign inputs, or a mapping from names of data sets to them.
        title: of the axes.
        ax: axes to draw into.

    Returns:
        The axes.

    Raises:
        DataError: no values, or NaN.

    Source: Hendrycks & Gimpel (2017) for AUROC; Liang, Li & Srikant (2018) for FPR95.

    Example:
        >>> ax = entropy_histogram([0.1, 0.2, 0.3], [0.3, 0.9])
        >>> ax.get_title("right")
        'AUROC 91.7%, FPR95 50.0%'
    """
    sets = outside if isinstance(outside, Mapping) else {"foreign": outside}
    if not sets:
        raise DataError("there is no foreign set to plot: the mapping is empty")
    familiar = _entropies(inside, "inside")
    foreign = {name: _entropies(values, f"outside {name!r}") for name, values in sets.items()}
    everything = np.concatenate([familiar, *foreign.values()])
    most = math.log(_num_classes(inside) or 1)  # 0: not known
    low, high = min(0.0, everything.min()), max(most, everything.max())
    edges = np.linspace(low, high if high > low else low + 1, NUM_BINS + 1)

    ax = own_axes(ax, figsize=(5.4, 3.6))
    grey = quiet(ax, 0.7)
    shares = np.histogram(familiar, edges)[0] / len(familiar)
    ax.stairs(shares, edges, fill=True, color=grey, alpha=0.45, label=f"familiar ({len(familiar):,})")
    for k, (name, values) in enumerate(foreign.items()):
        auroc, fpr = metrics.auroc(familiar, values), metrics.fpr_at_tpr(familiar, values)
        score = f"AUROC {auroc:.1%}, FPR95 {fpr:.1%}"
        label = f"{shortened(name, 28)} ({len(values):,})"
        if len(foreign) == 1:
            ax.set_title(score, loc="right", fontsize="medium")
        else:
            label += f": {score}"
        shares = np.histogram(values, edges)[0] / len(values)
        line: dict[str, Any] = {"color": color(ax, k), "linestyle": LINES[k % len(LINES)], "linewidth": 1.8}
        ax.stairs(shares, edges, baseline=None, label=label, **line)
    if most:
        ax.axvline(most, color=grey, linestyle=":", linewidth=1)
    if title:
        ax.set_title(title, loc="left", fontsize="medium", fontweight="bold")
    what = "predictive entropy (nats)" + ("; dotted: all classes alike" if most else "")
    ax.set(xlabel=what, ylabel="share of the set", ylim=(0, None))
    if len(foreign) > 1:
        legend_above(ax, 1.1 if title else 1)
    else:
        ax.legend(fontsize="small", frameon=False)
    return ax


def _entropies(values: Any, name: str) -> np.ndarray:
    return column(values.entropy if hasattr(values, "probabilities") else values, name)


def _num_classes(values: Any) -> int | None:
    """Return the number of classes of a prediction, two if it has one probability for each entropy."""
    if not hasattr(values, "probabilities"):
        return None
    p, entropy = values.probabilities, values.entropy
    return 2 if p.shape == entropy.shape else int(p.shape[-1])
