# SPDX-License-Identifier: Apache-2.0
"""The smallest eigenvalue against a dense decomposition."""

import pytest
import torch

from pyro_dvi.errors import ArgumentError
from pyro_dvi.linalg.lanczos import smallest_eigenpair
from tests.linalg.matrices import Counting, with_eigenvalues


@pytest.mark.parametrize("smallest", [-40.0, -1e-2, 1e-2, 0.9])
def test_full_dimension_equals_the_dense_decomposition(smallest):
    spectrum = torch.logspace(0, 3, 80, dtype=torch.float64)
    spectrum[0] = smallest
    matrix, vectors = with_eigenvalues(spectrum)
    found = smallest_eigenpair(lambda v: v @ matrix, torch.zeros(80, dtype=torch.float64), tolerance=1e-09)
    assert found.value == pytest.approx(smallest, rel=1e-8)
    assert abs(float(found.vector @ vectors[0])) == pytest.approx(1, abs=1e-9)
    true = float((found.vector @ matrix - found.value * found.vector).norm())
    assert found.residual == pytest.approx(true, abs=1e-11)
    assert found.norm == pytest.approx(1000, rel=1e-9)


def test_a_clear_negative_value_is_found_in_few_applications():
    spectrum = torch.linspace(1, 50, 400, dtype=torch.float64)
    spectrum[0] = -5
    operator = Counting(with_eigenvalues(spectrum)[0])
    found = smallest_eigenpair(operator, torch.zeros(400, dtype=torch.float64))
    assert found.value == pytest.approx(-5, rel=1e-3) and operator.vectors < 60


def test_value_is_an_upper_bound_and_unfinished_searches_say_so():
    spectrum = torch.logspace(-4, 4, 300, dtype=torch.float64)
    spectrum[0] = -1e-4
    matrix, _ = with_eigenvalues(spectrum)
    values = []
    for steps in (5, 20, 100):
        found = smallest_eigenpair(lambda v: v @ matrix, torch.zeros(300, dtype=torch.float64), steps=steps)
        assert found.residual > 1e-2 * abs(found.value)
        values.append(found.value)
    assert values[0] > values[1] > values[2] > -1e-4


def test_float32_one_dimension_identity_and_wrong_arguments():
    matrix, _ = with_eigenvalues(torch.linspace(-2, 30, 50, dtype=torch.float64))
    single = smallest_eigenpair(lambda v: v @ matrix.float(), torch.zeros(50))
    assert single.vector.dtype == torch.float32 and single.value == pytest.approx(-2, rel=1e-3)
    one = smallest_eigenpair(lambda v: -7 * v, torch.zeros(1))
    assert one.value == -7 and one.residual == 0
    assert (
        abs(smallest_eigenpair(torch.zeros_like, torch.zeros(5)).value)
        <= smallest_eigenpair(torch.zeros_like, torch.zeros(5)).resolution
    )
    with pytest.raises(ArgumentError, match="must be a positive whole number"):
        smallest_eigenpair(lambda v: v, torch.zeros(3), steps=0)
