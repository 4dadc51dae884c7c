# SPDX-License-Identifier: Apache-2.0
"""What all plots promise: nothing is changed that was not asked for, and labels have room."""

import pickle

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from pyro_dvi.analysis.plots import style
from pyro_dvi.errors import ArgumentError, DataError


def test_an_array_of_axes_is_refused():
    with pytest.raises(ArgumentError, match="not ndarray: of an array that plt.subplots returns"):
        style.own_axes(plt.subplots(1, 2)[1], (1, 1))


def test_names_are_thinned_out_where_they_have_no_room():
    _, ax = plt.subplots(figsize=(4, 2))
    style.name_rows(ax, [f"layer {k}" for k in range(100)])
    ax.figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in ax.get_yticklabels()]
    assert 5 < len(boxes) < 20
    assert not any(a.overlaps(b) for a, b in zip(boxes, boxes[1:], strict=False))
    assert ax.get_ylim() == (99.5, -0.5)


def test_figures_can_be_pickled():
    figure, ax = plt.subplots()
    style.name_rows(ax, ["a", "b"])
    style.log_axis(ax, 0.1, 10.0)
    copy = pickle.loads(pickle.dumps(figure))
    assert [label.get_text() for label in copy.axes[0].get_yticklabels()] == ["a", "b"]


def test_long_names_keep_their_ends():
    name = style.shortened("module." * 20 + "weight")
    assert len(name) <= style.LONGEST_NAME
    assert name.startswith("module.") and name.endswith("weight")
    assert style.shortened("short") == "short"


@pytest.mark.parametrize("look", ["default", "dark_background"])
def test_quiet_lines_can_be_told_from_the_background(look):
    with plt.style.context(look):
        _, ax = plt.subplots()
        grey = int(style.quiet(ax)[1:3], 16)
    assert 70 < grey < 185


def test_columns_are_flat_doubles_and_finite():
    assert style.column(torch.ones(2, 1, dtype=torch.bfloat16), "x").dtype == np.float64
    with pytest.raises(DataError, match="x holds 1 values of 2"):
        style.column([1.0, np.nan], "x")
    with pytest.raises(DataError, match="x is empty"):
        style.column([], "x")
