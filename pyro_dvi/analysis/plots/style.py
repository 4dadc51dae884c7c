# SPDX-License-Identifier: Apache-2.0
"""What the plots share: colours, axes to draw into, and room for labels.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart; no meaning rests on colour alone. What
stands behind the data (reference lines, grids) mixes the style's text colour with its background, so that dark styles
stay readable. Nothing here changes ``rcParams``.

Source: Okabe & Ito (2008), "Color universal design".
"""

import math
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.font_manager import font_scalings
from matplotlib.legend import Legend
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from pyro_dvi.errors import ArgumentError, DataError

_BLUE, VERMILLION = "#0072B2", "#D55E00"
SKY_BLUE = "#56B4E9"
# Without the palette's yellow and black, which vanish on white and on dark backgrounds.
_OTHERS = (VERMILLION, "#009E73", "#E69F00", "#CC79A7")
NUM_COLORS = 6
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))

LONGEST_NAME = 40  # characters of a row's name


def own_axes(ax: Axes | None, figsize: tuple[float, float]) -> Axes:
    """Return ``ax``, or the axes of a new figure.

    Raises:
        ArgumentError: something else than axes.
    """
    if ax is None:
        return plt.subplots(figsize=figsize, layout="constrained")[1]
    if not isinstance(ax, Axes):
        raise ArgumentError(
            f"ax is one matplotlib.axes.Axes to draw into, not {type(ax).__name__}: of an array that plt.subplots "
            "returns, pass one element"
        )
    return ax


def own_panels(
    axes: Sequence[Axes] | None,
    names: Sequence[str],
    what: str,
    *,
    columns: int,
    size: tuple[float, float],
    margin: float = 0.0,
    sharey: bool = False,
) -> np.ndarray:
    """Return ``axes``, or those of a new figure, one for each name.

    Args:
        axes: axes to draw into; by default a new figure.
        names: what the panels show.
        what: how an error introduces the names.
        columns: panels side by side, at most.
        size: of a new panel, in inches.
        margin: inches on the left of a new figure, for names of rows.
        sharey: whether new panels have the same rows.

    Raises:
        ArgumentError: another number of axes.
    """
    drawn: np.ndarray
    if axes is None:
        wide = min(len(names), columns)
        high = -(-len(names) // wide)
        figsize = (margin + size[0] * wide, size[1] * high)
        figure, grid = plt.subplots(
            high, wide, figsize=figsize, layout="constrained", squeeze=False, sharey=sharey
        )
        for unused in grid.ravel()[len(names) :]:
            figure.delaxes(unused)
        drawn = grid.ravel()[: len(names)]
    else:
        drawn = np.atleast_1d(np.asarray(axes, dtype=object)).ravel()
    if len(drawn) != len(names):
        raise ArgumentError(f"{what} {list(names)}, but there are {len(drawn)} axes")
    return drawn


def dots(
    ax: Axes, x: np.ndarray, is_open: np.ndarray, labels: tuple[str | None, str | None], **style: Any
) -> None:
    """Draw a dot in each row, some of them open; ``labels`` are those of full and open ones."""
    faces = style["color"], ax.get_facecolor()
    for chosen, face, label in zip((~is_open, is_open), faces, labels, strict=True):
        if chosen.any():
            rows = np.flatnonzero(chosen)
            ax.plot(x[chosen], rows, marker="o", linestyle="none", markerfacecolor=face, label=label, **style)


def quiet(ax: Axes, strength: float = 0.6) -> str:
    """Return a colour between the background (0) and the text (1)."""
    text, ground = np.array(to_rgb(rcParams["text.color"])), np.array(to_rgb(ax.get_facecolor()))
    return to_hex(tuple((strength * text + (1 - strength) * ground).tolist()))


def blue(ax: Axes) -> str:
    """Return the colour of what a plot is about: blue, the lighter one on dark backgrounds."""
    return SKY_BLUE if _is_dark(ax) else _BLUE


def color(ax: Axes, k: int) -> str:
    """Return the k-th colour of several; they repeat after six."""
    last = _BLUE if _is_dark(ax) else SKY_BLUE
    return (blue(ax), *_OTHERS, last)[k % NUM_COLORS]


def split_off(ax: Axes, what: str, *, below: bool) -> Axes:
    """Split the lower or the right part off ``ax``, so that layout engines see two ordinary axes.

    Raises:
        ArgumentError: ``ax`` is not part of a grid.
    """
    place, figure = ax.get_subplotspec(), ax.get_figure(root=False)
    if place is None or figure is None:
        raise ArgumentError(
            f"ax must be part of a grid, as plt.subplots makes it, to share its place with {what}"
        )
    if below:
        cells = place.subgridspec(2, 1, height_ratios=[3.2, 1], hspace=0.06)
    else:
        cells = place.subgridspec(1, 2, width_ratios=[1.3, 1], wspace=0.06)
    ax.set_subplotspec(cells[0])
    return figure.add_subplot(cells[1], **{"sharex" if below else "sharey": ax})


def row_size(ax: Axes, rows: int, largest: float) -> float:
    """Return a size of marks in points, at most ``largest``, that leaves room between rows."""
    return min(largest, 0.7 * _size(ax)[1] / max(rows, 1))


def legend_above(ax: Axes, height: float = 1.0, **options: Any) -> Legend:
    """Put a legend without a frame on top of ``ax``, from the left; ``height`` counts in heights of ``ax``."""
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, height), "borderaxespad": 0.2}
    return ax.legend(fontsize="small", frameon=False, **place, **options)


def name_rows(ax: Axes, names: list[str]) -> None:
    """Name the rows 0, 1, ... of ``ax``, the first at the top; every k-th where not all names have room."""
    room = 0.75 * _size(ax)[1] / (1.2 * rcParams["font.size"] * font_scalings["small"])
    step = -(-len(names) // max(1, int(room)))
    ax.set_yticks(range(0, len(names), step), [shortened(name) for name in names[::step]])
    ax.tick_params(axis="y", length=0, labelsize="small")
    ax.grid(axis="y", color=quiet(ax), alpha=0.15)
    ax.set_ylim(len(names) - 0.5, -0.5)


def log_axis(ax: Axes, low: float, high: float) -> None:
    """Make the horizontal axis logarithmic; 1, 2 and 5 of each decade, or as many as have room, are plain numbers."""
    ax.set_xscale("log")
    ax.set_xlim(low, high)
    decades = math.log10(high / low)
    room = _size(ax)[0] / (3.2 * rcParams["font.size"])
    subs = next((subs for subs in ((1, 2, 5), (1, 3)) if len(subs) * decades <= room), (1,))
    ax.xaxis.set_major_locator(LogLocator(subs=subs, numticks=max(2, int(room))))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(_plain))


def shortened(name: str, longest: int = LONGEST_NAME) -> str:
    """Return a name with its middle left out if it is too long for an axis."""
    half = (longest - 1) // 2
    return name if len(name) <= longest else f"{name[:half]}…{name[-half:]}"


def column(values: Any, name: str) -> np.ndarray:
    """Return ``values`` as a flat array of doubles.

    Raises:
        DataError: no values, no numbers, or some that are not finite.
    """
    if hasattr(values, "detach"):
        values = values.detach().cpu().double()
    try:
        numbers = np.asarray(values, dtype=float).ravel()
    except (TypeError, ValueError) as error:
        raise DataError(f"{name} of type {type(values).__name__} holds no numbers: {error}") from error
    if not numbers.size:
        raise DataError(f"{name} is empty")
    if not np.isfinite(numbers).all():
        bad = int((~np.isfinite(numbers)).sum())
        raise DataError(f"{name} holds {bad} values of {numbers.size} that are NaN or infinite")
    return numbers


def _plain(value: float, _position: int | None) -> str:
    return f"{value:g}"


def _is_dark(ax: Axes) -> bool:
    red, green, blue = to_rgb(ax.get_facecolor())
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.4


def _size(ax: Axes) -> tuple[float, float]:
    """Width and height in points; before the figure is drawn, without what a layout engine takes for labels."""
    figure = ax.get_figure(root=True)
    assert figure is not None, "axes belong to a figure"
    place, (width, height) = ax.get_position(), figure.get_size_inches()
    return 72 * place.width * float(width), 72 * place.height * float(height)
