# SPDX-License-Identifier: Apache-2.0
"""Axes and columns of numbers that the plots accept."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from pyro_dvi.analysis.plots import style
from pyro_dvi.errors import ArgumentError, DataError


def test_an_array_of_axes_is_refused():
    with pytest.raises(ArgumentError, match="not ndarray: pass one element of the array"):
        style.own_axes(plt.subplots(1, 2)[1], (1, 1))


def test_columns_are_flat_doubles_and_finite():
    assert style.column(torch.ones(2, 1, dtype=torch.bfloat16), "x").dtype == np.float64
    for values in ([1.0, np.nan], []):
        with pytest.raises(DataError, match="x is empty, or contains values that are NaN"):
            style.column(values, "x")
