# SPDX-License-Identifier: Apache-2.0
"""What the plots share: colours, axes to draw into, and room for labels.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart; no meaning rests on colour alone. What
stands behind the data (reference lines, grids) mixes the style's text colour with its background, so that dark styles
stay readable. Nothing here changes ``rcParams``.

Source: Okabe & Ito (2008), "Color universal design".
"""

import math
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_hex, to_rgb
from matplotlib.font_manager import font_scalings
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from pyro_dvi.errors import ArgumentError, DataError

__all__ = [
    "BLUE",
    "COLORS",
    "LINES",
    "MARKERS",
    "VERMILLION",
    "axes_below",
    "axes_beside",
    "column",
    "log_ticks",
    "name_rows",
    "own_axes",
    "quiet",
    "shortened",
]

BLUE, VERMILLION = "#0072B2", "#D55E00"
# Without the palette's yellow and black, which vanish on white and on dark backgrounds.
COLORS = (BLUE, VERMILLION, "#009E73", "#E69F00", "#56B4E9", "#CC79A7")
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P")

LONGEST_NAME = 40  # characters of a row's name


def own_axes(ax: Axes | None, figsize: tuple[float, float]) -> Axes:
    """Return ``ax``, or the axes of a new figure."""
    return plt.subplots(figsize=figsize, layout="constrained")[1] if ax is None else ax


def quiet(ax: Axes, strength: float = 0.6) -> str:
    """Return a colour between the background (0) and the text (1)."""
    text, ground = np.array(to_rgb(rcParams["text.color"])), np.array(to_rgb(ax.get_facecolor()))
    return to_hex(tuple((strength * text + (1 - strength) * ground).tolist()))


def axes_below(ax: Axes, what: str) -> Axes:
    """Split the lower quarter off ``ax`` for ``what``, so that layout engines see two ordinary axes.

    Raises:
        ArgumentError: ``ax`` is not part of a grid.
    """
    place = ax.get_subplotspec()
    if place is None:
        raise ArgumentError(
            f"ax must be part of a grid, as plt.subplots makes it: {what} take its lower part"
        )
    grid = place.subgridspec(2, 1, height_ratios=[3.2, 1], hspace=0.06)
    ax.set_subplotspec(grid[0])
    figure = ax.get_figure(root=False)
    assert figure is not None, "axes with a place in a grid belong to a figure"
    return figure.add_subplot(grid[1], sharex=ax)


def axes_beside(ax: Axes, what: str) -> Axes:
    """Split the right part off ``ax`` for ``what``.

    Raises:
        ArgumentError: ``ax`` is not part of a grid.
    """
    place = ax.get_subplotspec()
    if place is None:
        raise ArgumentError(
            f"ax must be part of a grid, as plt.subplots makes it: {what} take its right part"
        )
    grid = place.subgridspec(1, 2, width_ratios=[1.3, 1], wspace=0.06)
    ax.set_subplotspec(grid[0])
    figure = ax.get_figure(root=False)
    assert figure is not None, "axes with a place in a grid belong to a figure"
    return figure.add_subplot(grid[1], sharey=ax)


def name_rows(ax: Axes, names: list[str]) -> None:
    """Name the rows 0, 1, ... of ``ax``, the first at the top; every k-th where not all names have room."""
    figure = ax.get_figure(root=True)
    assert figure is not None, "axes belong to a figure"
    height = 72 * ax.get_position().height * figure.get_figheight()  # points
    room = max(1, int(height / (1.15 * _points("small"))))
    step = -(-len(names) // room)
    places = list(range(0, len(names), step))
    ax.set_yticks(places, [shortened(names[k]) for k in places], fontsize="small")
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(len(names) - 0.5, -0.5)


def log_ticks(axis: Axis) -> None:
    """Label 1, 2 and 5 of each decade on a short logarithmic axis, decades on a long one, in plain numbers."""
    low, high = sorted(axis.get_view_interval())
    decades = math.log10(high / low)
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2.5 else (1,), numticks=8))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def shortened(name: str, longest: int = LONGEST_NAME) -> str:
    """Return a name with its middle left out if it is too long for an axis."""
    half = (longest - 1) // 2
    return name if len(name) <= longest else f"{name[:half]}…{name[-half:]}"


def column(values: Any, name: str) -> np.ndarray:
    """Return ``values`` as a flat array of doubles.

    Raises:
        DataError: no values, or some that are not finite.
    """
    if hasattr(values, "detach"):
        values = values.detach().cpu().double()
    numbers = np.asarray(values, dtype=float).ravel()
    if not numbers.size:
        raise DataError(f"{name} is empty")
    if not np.isfinite(numbers).all():
        bad = int((~np.isfinite(numbers)).sum())
        raise DataError(f"{name} holds {bad} values of {numbers.size} that are NaN or infinite")
    return numbers


def _points(size: str) -> float:
    return float(rcParams["font.size"]) * float(font_scalings[size])
