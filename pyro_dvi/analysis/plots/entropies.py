# SPDX-License-Identifier: Apache-2.0
"""Are foreign inputs noticed?"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from pyro_dvi.analysis.plots.style import LINES, color, column, legend_above, own_axes, quiet, shortened
from pyro_dvi.core.arguments import check_count
from pyro_dvi.errors import DataError
from pyro_dvi.predictive import metrics


def entropy_histogram(
    inside: Any, outside: Any, *, num_bins: int = 40, title: str | None = None, ax: Axes | None = None
) -> Axes:
    r"""Draw the predictive entropies of familiar inputs beside those of foreign ones.

    The further apart, the better foreign inputs are noticed: AUROC is the probability that a foreign input is the more
    uncertain one, FPR95 the share of foreign inputs that pass where 95 % of the familiar ones do. Both are in the
    title, or in the legend where there are several foreign sets. Histograms are shares of their own set, so that sets
    of different size can be compared. Familiar inputs are filled. A dotted line marks :math:`\log C`, if it is known.

    Args:
        inside: entropies of familiar inputs in nats, any shape, or a :class:`~pyro_dvi.Prediction` of classes. Any
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
