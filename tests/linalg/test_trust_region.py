# SPDX-License-Identifier: Apache-2.0
"""The quadratic model within a radius: the conditions that only its minimum meets."""

import pytest
import torch

from pyro_dvi.linalg.trust_region import KrylovModel, minimise_within
from tests.linalg.matrices import Counting, rows, with_eigenvalues


@pytest.mark.parametrize("lowest", [-3.0, -1e-9, 0.0, 1e-9, 2.0])
@pytest.mark.parametrize("radius", [1e-6, 0.5, 1e3])
@pytest.mark.parametrize("hard", [False, True])
def test_conditions_of_the_minimum(lowest, radius, hard):
    """The global minimum: if and only if A + sigma is positive semi-definite, and so on."""
    values = torch.tensor([lowest, 2.5, 4.0, 40.0], dtype=torch.float64)
    gradient = rows(1, 4)[0]
    if hard:
        gradient[0] = 0.0
    h, sigma = minimise_within(values, gradient, radius)
    torch.testing.assert_close((values + sigma) * h, -gradient, rtol=1e-9, atol=1e-9)
    assert sigma >= 0 and float(values[0]) + sigma >= 0
    assert float(h.norm()) <= radius * (1 + 1e-9)
    if sigma > 0:
        assert float(h.norm()) == pytest.approx(radius, rel=1e-9)


def test_gradient_of_zero_in_a_flat_model():
    h, _ = minimise_within(torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64), 3.0)
    torch.testing.assert_close(h, torch.full((2,), -3 / 2**0.5, dtype=torch.float64))


@pytest.mark.parametrize("lowest", [-2.0, 0.5])
def test_full_krylov_space_gives_the_minimum_for_every_radius_without_a_product(lowest):
    spectrum = torch.linspace(lowest, 20, 25, dtype=torch.float64)
    matrix, vectors = with_eigenvalues(spectrum)
    gradient = rows(1, 25)[0]
    operator = Counting(matrix)
    model = KrylovModel(operator, gradient, 25)
    model.grow(radius=1.0, forcing=1e-12, tolerance=1e-30)
    applied = operator.vectors
    for radius in (0.1, 1.0, 10.0):
        h, sigma = minimise_within(spectrum, vectors @ gradient, radius)
        step = model.step(radius)
        torch.testing.assert_close(model.vector(step), h @ vectors, rtol=1e-7, atol=1e-8)
        decrease = -float(gradient @ (h @ vectors) + 0.5 * (spectrum * h.square()).sum())
        assert step.decrease == pytest.approx(decrease, rel=1e-9)
        assert step.interior == (sigma == 0)
    assert operator.vectors == applied


def test_decrement_is_bounded_from_above():
    matrix, _ = with_eigenvalues(torch.logspace(0, 4, 60, dtype=torch.float64))
    gradient = rows(1, 60)[0]
    exact = float(gradient @ torch.linalg.solve(matrix, gradient))
    model = KrylovModel(lambda v: v @ matrix, gradient, 60)
    step = model.grow(radius=1e9, forcing=0.1, tolerance=1e-30)
    assert 2 * step.decrease < exact <= step.decrement
    step = model.grow(radius=1e9, forcing=1e-12, tolerance=1e-30)
    assert step.decrement == pytest.approx(exact, rel=1e-9)
