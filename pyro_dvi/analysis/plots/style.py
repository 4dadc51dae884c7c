# SPDX-License-Identifier: Apache-2.0
"""Axes, legends and checks shared by the plots.

The colours are ``"C0"``, ``"C1"``, ... of the user's style. They are combined with line styles, so that no meaning
depends on colour alone. Reference lines are grey, which is visible on white and on black. Nothing here changes
``rcParams``.
"""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.legend import Legend

from pyro_dvi.errors import ArgumentError, DataError

GREY = "gray"


def own_axes(ax: Axes | None, figsize: tuple[float, float]) -> Axes:
    """Return ``ax``, or the axes of a new figure.

    Raises:
        ArgumentError: if ``ax`` is not a single ``Axes``.
    """
    if ax is None:
        return plt.subplots(figsize=figsize, layout="constrained")[1]
    if not isinstance(ax, Axes):
        raise ArgumentError(
            f"ax must be one matplotlib.axes.Axes, not {type(ax).__name__}: pass one element of the array that "
            "plt.subplots returns"
        )
    return ax


def legend_above(ax: Axes, height: float = 1.0, **options: Any) -> Legend:
    """Put a frameless, left-aligned legend above ``ax``, at ``height`` times the height of ``ax``."""
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, height), "borderaxespad": 0.2}
    return ax.legend(fontsize="small", frameon=False, **place, **options)


def percent(value: float, place: float = 0) -> str:
    """Return a tick label with all digits of the tick's value, such as 2.5%."""
    return f"{100 * value:.6g}%"


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
