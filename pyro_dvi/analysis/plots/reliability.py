# SPDX-License-Identifier: Apache-2.0
"""Plots of classifications: is their confidence justified, and are the uncertain predictions the wrong ones?"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from pyro_dvi.analysis.plots.style import (
    LINES,
    blue,
    color,
    legend_above,
    own_axes,
    quiet,
    shortened,
    split_off,
)
from pyro_dvi.errors import DataError
from pyro_dvi.predictive import metrics


def _of_classes(prediction: Any, labels: Any, name: str = "") -> tuple[Any, Any]:
    """Return class probabilities and their labels, without those that the model masks.

    Args:
        prediction: probabilities, or a :class:`~pyro_dvi.predictive.Prediction` of classes.
        labels: observed classes; None for those of the prediction.
        name: of the method, for errors.

    Raises:
        DataError: no labels.
        UnsupportedError: a prediction of numbers.
    """
    is_prediction = hasattr(prediction, "probabilities")
    observed = prediction.observed if labels is None and is_prediction else labels
    if observed is None:
        what = f"the predictions of {name!r}" if name else "the predictions"
        raise DataError(f"{what} came without labels: pass labels, or predict from data that hold them")
    if not is_prediction:
        return prediction, observed
    p = prediction.probabilities
    observed = torch.as_tensor(observed, device=p.device)
    kept = prediction.mask
    if prediction.is_one_hot:
        kept = None if kept is None else kept.any(-1)
        observed = observed.argmax(-1) if observed.shape == p.shape else observed
    # Labels of another shape are refused where they are scored.
    if kept is None or observed.shape != kept.shape:
        return p, observed
    return p[kept], observed[kept]


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
            :class:`~pyro_dvi.predictive.Prediction` of classes.
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
    probabilities, labels = _of_classes(probabilities, labels)
    table = metrics.reliability_table(probabilities, labels, num_bins)
    error = metrics.expected_calibration_error(probabilities, labels, num_bins)
    edges, count = table.edges.numpy(), table.count.numpy()
    filled, width = count > 0, 1 / num_bins
    confidence, accuracy = table.confidence.numpy()[filled], table.accuracy.numpy()[filled]
    spread = np.sqrt(accuracy * (1 - accuracy) / count[filled])

    ax = own_axes(ax, figsize=(4.2, 5.0))
    grey, main = quiet(ax), blue(ax)
    ax.plot([0, 1], [0, 1], color=grey, linestyle="--", linewidth=1)
    gaps: dict[str, Any] = {
        "bottom": confidence,
        "width": width,
        "color": grey,
        "alpha": 0.25,
        "linewidth": 0,
    }
    ax.bar(edges[:-1][filled] + width / 2, accuracy - confidence, **gaps)
    few = count[filled] < FEW
    faint: dict[str, Any] = {"linestyle": "none", "markerfacecolor": ax.get_facecolor(), "alpha": 0.5}
    for chosen, style in ((~few, {"linewidth": 1.5}), (few, faint)):
        style |= {"yerr": spread[chosen], "color": main, "elinewidth": 1, "marker": "o", "markersize": 4}
        ax.errorbar(confidence[chosen], accuracy[chosen], **style)
    ax.set(xlim=(0, 1), ylim=(0, 1.02), ylabel="accuracy")
    ax.set_title(title or "", loc="left", fontsize="medium", fontweight="bold")
    turned: dict[str, Any] = {"rotation": 45, "rotation_mode": "anchor", "transform_rotates_text": True}
    ax.text(0.03, 0.05, "calibrated", color=grey, **turned)
    ax.set_title(f"ECE {error:.1%}", loc="right", fontsize="medium")
    ax.tick_params(labelbottom=False)

    counts = split_off(ax, "the counts", below=True)
    counts.bar(edges[:-1] + width / 2, count / count.sum(), width=width * 0.9, color=blue(ax))
    counts.set(xlabel=f"confidence ({count.sum():,} examples)", ylabel="share", xlim=(0, 1))
    counts.yaxis.set_major_locator(MaxNLocator(3, prune="upper"))
    for axis in (ax.yaxis, counts.yaxis, counts.xaxis):
        axis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    return ax


def rejection_curve(
    predictions: Any,
    labels: Any = None,
    *,
    uncertainty: Any = None,
    title: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    r"""Draw the error of what is left when the most uncertain predictions are rejected.

    Below each curve, in its colour, lies the area that no ranking can undercut: that of an oracle, which rejects the
    wrong ones first and has the error :math:`\max(0, (e - r)/(1 - r))`. A ranking that says nothing keeps the error e,
    a thin line. The legend has the area under the curve, :func:`~pyro_dvi.predictive.metrics.aumrc`. Low is good.

    Args:
        predictions: class probabilities ``[N, C]`` (``[N]`` of label 1), a
            :class:`~pyro_dvi.predictive.Prediction`, or a mapping from names of methods to either.
        labels: observed classes ``[N]``; by default those of the predictions.
        uncertainty: what to rank by, ``[N]``, high values first; a mapping by name where ``predictions`` is one. By
            default the predictive entropy.
        title: of the axes.
        ax: axes to draw into.

    Returns:
        The axes.

    Raises:
        DataError: probabilities, labels or uncertainties that cannot be right, or a method without its own.

    Source: Schmitt & Roth (2021), appendix D.

    Example:
        >>> ax = rejection_curve([[0.9, 0.1], [0.6, 0.4]], [0, 1])
        >>> ax.get_legend_handles_labels()[1]
        ['AUMRC 0.250']
    """
    methods = predictions if isinstance(predictions, Mapping) else {"": predictions}
    if not methods:
        raise DataError("there are no predictions to plot: the mapping is empty")
    ax = own_axes(ax, figsize=(5.0, 3.8))
    highest = 0.0
    for k, (name, prediction) in enumerate(methods.items()):
        p, y = _of_classes(prediction, labels, name)
        u = uncertainty
        if isinstance(uncertainty, Mapping):
            if name not in uncertainty:
                raise DataError(f"method {name!r} has no uncertainty; there are those of {list(uncertainty)}")
            u = uncertainty[name]
        curve = metrics.rejection_curve(p, y, u)
        areas = f"AUMRC {metrics.aumrc(p, y, u):.3f}"
        error = float(curve.error[0])
        rejected = curve.rejected.numpy()
        line: dict[str, Any] = {"color": color(ax, k), "linestyle": LINES[k % len(LINES)], "zorder": 3}
        label = f"{shortened(name, 24)}: {areas}" if name else areas
        ax.plot(rejected, curve.error.numpy(), label=label, **line)
        kept = np.maximum(1 - rejected, 1e-12)  # at the last point nothing is left that could be wrong
        oracle = np.clip(error - rejected, 0, None) / kept
        ax.fill_between(rejected, oracle, color=color(ax, k), alpha=0.12, linewidth=0)
        ax.axhline(error, color=color(ax, k), linewidth=0.6, alpha=0.7, zorder=1)
        highest = max(highest, float(curve.error.max()))
    ax.set(xlim=(0, 1), ylim=(0, 1.08 * highest or 0.1), xlabel="rejected", ylabel="error of the rest")
    if title:
        ax.set_title(title, loc="left", fontsize="medium", fontweight="bold")
    ax.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.yaxis.set_major_locator(MaxNLocator(5))
    legend = legend_above(ax, 1.08 if title else 1, alignment="left")
    legend.set_title("thin: random rejection; shaded: below an oracle")
    legend.get_title().set(color=quiet(ax, 0.75), fontsize="x-small")
    return ax
