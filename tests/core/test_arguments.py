# SPDX-License-Identifier: Apache-2.0
"""Options that are objects or counts."""

import numpy as np
import pytest

from pyro_dvi.core.arguments import check_choice, check_count, check_positive
from pyro_dvi.errors import ArgumentError


@pytest.mark.parametrize("value", [1, 7, np.int64(3)])
def test_a_count_may_be_a_whole_number_of_python_or_numpy(value):
    check_count("num_samples", value)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "3", None])
def test_what_is_no_count_is_refused_by_name(value):
    with pytest.raises(ArgumentError, match=f"num_samples must be a positive whole number, not {value!r}"):
        check_count("num_samples", value)


def test_a_count_may_have_a_least_value():
    check_count("num_samples", 2, least=2)
    with pytest.raises(ArgumentError, match="num_samples must be a whole number of at least 2, not 1"):
        check_count("num_samples", 1, least=2)


def test_a_class_in_place_of_an_object_is_answered_with_how_to_make_one():
    check_choice("order", 1.5, float, "float(1)")
    with pytest.raises(ArgumentError, match=r"order must be an object such as float\(1\), not 'first'"):
        check_choice("order", "first", float, "float(1)")
    with pytest.raises(ArgumentError, match=r"not the class float itself: write float\(\.\.\.\)"):
        check_choice("order", float, float, "float(1)")


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, "3", None])
def test_what_is_no_positive_number_is_refused_by_name(value):
    check_positive("lr", 1e-3)
    with pytest.raises(ArgumentError, match=f"lr must be a positive number, not {value!r}"):
        check_positive("lr", value)
