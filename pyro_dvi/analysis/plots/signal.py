# SPDX-License-Identifier: Apache-2.0
"""Which weights could be zero?"""

from typing import Any

import numpy as np
from matplotlib import colormaps, rcParams
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from pyro_dvi.analysis import diagnostics
from pyro_dvi.analysis.plots.style import LINES, NUM_COLORS, color, log_axis, own_axes, quiet, shortened
from pyro_dvi.errors import ArgumentError

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
