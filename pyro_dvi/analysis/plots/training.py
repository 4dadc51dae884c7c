# SPDX-License-Identifier: Apache-2.0
"""How did training go, and had it ended when it ended?"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from pyro_dvi.analysis.diagnostics.scale_report import ScaleCourse, scale_course
from pyro_dvi.analysis.plots.style import VERMILLION, blue, color, own_panels, quiet
from pyro_dvi.errors import DataError

# Columns of a training record that have a panel of their own, in this order; validation metrics follow.
_TERMS = {
    "loss": "loss (objective)",
    "log_likelihood": "log-likelihood",
    "penalty": "penalty",
    "kl": "KL (unweighted)",
    "posterior_scale": "mean posterior σ",
}


def training_history(history: Any, *, axes: Sequence[Axes] | None = None) -> np.ndarray:
    """Draw the course of training: the loss, its terms, the posterior scales and validation metrics by epoch.

    Whether the loss has settled says little about the posterior: scales converge last. The title of their panel says
    how much the mean posterior σ changed in the last tenth of training, which is shaded where it still moved, by more
    than one per cent; it has no verdict where the learning rate had fallen to zero, or where σ has hardly moved since
    the first epoch (:func:`~pyro_dvi.analysis.diagnostics.scale_course`). Then train longer or raise ``scale_multiplier`` of
    :func:`~pyro_dvi.learning_rates`.

    Args:
        history: what :func:`~pyro_dvi.fit` returned, or a mapping of columns of equal length, with ``epoch`` among
            them or counted from 1.
        axes: one for each panel, in the order of the columns.

    Returns:
        Array of the axes, one for each column that the history has.

    Raises:
        ArgumentError: another number of axes than of panels.
        DataError: no history, nothing recorded, or columns of unequal length.

    Source: the warning that variances converge more slowly than means is that of Unlu & Aitchison (2021), section 4.

    Example:
        >>> axes = training_history({"epoch": [1, 2], "loss": [3.0, 2.0], "kl": [0.1, 0.2]})
        >>> [ax.get_ylabel() for ax in axes]
        ['loss (objective)', 'KL (unweighted)']
    """
    columns: Mapping[str, Sequence[float]] = getattr(history, "epochs", history)
    if not isinstance(columns, Mapping):
        raise DataError(
            f"history is what fit returned, or a mapping of columns such as {{'loss': [3.0, 2.0]}}, not "
            f"{type(history).__name__}"
        )
    texts = _TERMS | {
        name: name.removeprefix("validation_").replace("_", " ") + " (validation)"
        for name in columns
        if name.startswith("validation_")
    }
    panels = {
        name: text for name, text in texts.items() if name in columns and np.isfinite(columns[name]).any()
    }
    if not panels:
        raise DataError(
            f"the history has nothing to plot: it needs a finite value of {', '.join(_TERMS)} or validation_*, and has "
            f"the columns {list(columns)}"
        )
    length = len(columns[next(iter(panels))])
    epochs = np.asarray(columns["epoch"]) if "epoch" in columns else np.arange(1, length + 1)
    if any(len(columns[name]) != len(epochs) for name in panels):
        raise DataError(f"the columns differ in length: { {name: len(columns[name]) for name in columns} }")
    what = f"the history has {len(panels)} panels"
    drawn = own_panels(axes, list(panels), what, columns=3, size=(3.6, 2.7))
    for ax, (name, text) in zip(drawn, panels.items(), strict=True):
        values = np.asarray(columns[name], dtype=float)
        known = np.isfinite(values)  # a metric that is not measured every epoch is joined by lines
        line = color(ax, 2) if name.startswith("validation_") else blue(ax)
        _draw(ax, epochs[known], values[known], line)
        ax.set(xlabel="epoch", ylabel=text)
        if name == "posterior_scale":
            _judge(ax, epochs[known], scale_course(values.tolist(), columns.get("lr")))
    return drawn


def _draw(ax: Axes, epochs: np.ndarray, values: np.ndarray, line: str) -> None:
    ax.plot(epochs, values, color=line, marker="o" if len(epochs) < 20 else None)
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    ax.yaxis.set_major_locator(MaxNLocator(5))
    if len(epochs) == 1:
        ax.set_xlim(epochs[0] - 1, epochs[0] + 1)


def _judge(ax: Axes, epochs: np.ndarray, course: ScaleCourse | None) -> None:
    """Say whether the scales still move."""
    if course is None:
        return
    shade = VERMILLION if course.moves or course.doubt else quiet(ax, 0.8)
    ax.set_title(str(course), loc="left", fontsize="small", color=shade)
    if course.moves:
        ax.axvspan(epochs[-1 - course.epochs], epochs[-1], color=VERMILLION, alpha=0.15, linewidth=0)
