# SPDX-License-Identifier: Apache-2.0
"""Conjugate gradients against dense solves."""

import pytest
import torch

from pyro_dvi.errors import NonFiniteError, NotPositiveDefiniteError
from pyro_dvi.linalg.operator import conjugate_gradients
from tests.linalg.matrices import Counting, rows, with_eigenvalues

CONDITIONED = torch.logspace(0, 2, 40, dtype=torch.float64)


def test_solves_as_a_dense_solver_does():
    matrix, _ = with_eigenvalues(CONDITIONED)
    b = rows(5, 40)
    solution = conjugate_gradients(lambda v: v @ matrix, b, tolerance=1e-13)
    assert solution.converged
    torch.testing.assert_close(solution.x, torch.linalg.solve(matrix, b.T).T, rtol=1e-10, atol=1e-11)


def test_residuals_are_those_of_the_solution():
    matrix, _ = with_eigenvalues(CONDITIONED)
    b = rows(3, 40)
    solution = conjugate_gradients(lambda v: v @ matrix, b, tolerance=1e-5)
    expected = (b - solution.x @ matrix).norm(dim=-1) / b.norm(dim=-1)
    torch.testing.assert_close(solution.residuals, expected, rtol=1e-8, atol=0)
    assert bool((solution.residuals <= 1e-5).all())


def test_zero_right_hand_side_costs_nothing():
    operator = Counting(torch.eye(3))
    solution = conjugate_gradients(operator, torch.zeros(2, 3))
    assert operator.calls == 0 and solution.converged and not solution.x.any()


def test_one_dimension():
    solution = conjugate_gradients(lambda v: 4 * v, torch.tensor([[2.0], [-8.0]]))
    torch.testing.assert_close(solution.x, torch.tensor([[0.5], [-2.0]]))


def test_identity_that_returns_its_argument():
    b = rows(2, 7)
    solution = conjugate_gradients(lambda v: v, b)
    torch.testing.assert_close(solution.x, b)
    assert solution.iterations == 1


def prior_with_data(dim: int, rank: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    factor = torch.randn(dim, rank, generator=generator, dtype=torch.float64)
    factor = factor * torch.logspace(-1, 1, rank, dtype=torch.float64)
    return (factor @ factor.T + torch.eye(dim, dtype=torch.float64)).to(dtype)


@pytest.mark.parametrize("count", [1, 4, 30, 70])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-3)], ids=str)
def test_solutions_are_those_of_a_dense_solve(count: int, dtype: torch.dtype, tolerance: float) -> None:
    matrix = prior_with_data(50, 20, dtype)
    rhs = torch.randn(count, 50, generator=torch.Generator().manual_seed(2)).to(dtype)
    rhs[0] = 0.0
    if count > 2:
        rhs[2] = 3 * rhs[1]  # right-hand sides that depend on each other
    found = conjugate_gradients(lambda v: v @ matrix, rhs, tolerance=tolerance)
    assert found.converged
    residuals = (rhs - found.x @ matrix).norm(dim=1)
    assert bool((residuals <= 2 * tolerance * rhs.norm(dim=1)).all())
    expected = torch.linalg.solve(matrix.double(), rhs.double().T).T
    assert float((found.x - expected).norm()) <= 2 * tolerance * float(rhs.double().norm())


def test_many_right_hand_sides_take_fewer_iterations_than_one_by_one() -> None:
    matrix = prior_with_data(300, 120)
    rhs = torch.randn(40, 300, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    together = conjugate_gradients(lambda v: v @ matrix, rhs)
    single = conjugate_gradients(lambda v: v @ matrix, rhs[:1])
    assert together.converged and single.converged
    assert 4 * together.iterations < single.iterations


def test_not_converged_is_said():
    matrix, _ = with_eigenvalues(CONDITIONED)
    solution = conjugate_gradients(lambda v: v @ matrix, rows(1, 40), max_iterations=3)
    assert not solution.converged and solution.iterations == 3 and float(solution.residuals) > 1e-3


@pytest.mark.parametrize("smallest", [-1.0, -1e-3, 0.0])
def test_indefinite_and_singular_matrices_raise_with_the_direction(smallest):
    eigenvalues = CONDITIONED.clone()
    eigenvalues[0] = smallest
    matrix, vectors = with_eigenvalues(eigenvalues)
    with pytest.raises(NotPositiveDefiniteError, match="d'A d") as caught:
        conjugate_gradients(lambda v: v @ matrix, vectors[[0]] + 0.1 * rows(1, 40), tolerance=1e-14)
    d, curvature = caught.value.direction, caught.value.curvature
    assert curvature == pytest.approx(float(d @ matrix @ d / (d @ d)), rel=1e-6, abs=1e-12)
    assert curvature <= 1e-9


def test_zero_matrix_raises():
    with pytest.raises(NotPositiveDefiniteError):
        conjugate_gradients(torch.zeros_like, torch.ones(1, 3))


def test_float32_claims_convergence_only_where_the_true_residual_is_small():
    matrix, _ = with_eigenvalues(torch.logspace(-3, 0, 60, dtype=torch.float64))
    single, b = matrix.float(), rows(2, 60, dtype=torch.float32)
    for tolerance in (1e-2, 1e-4, 1e-6, 1e-9):
        solution = conjugate_gradients(lambda v: v @ single, b, tolerance=tolerance, max_iterations=2000)
        true = (b.double() - solution.x.double() @ single.double()).norm(dim=-1) / b.double().norm(dim=-1)
        assert solution.x.dtype == torch.float32
        torch.testing.assert_close(solution.residuals.double(), true, rtol=0.5, atol=1e-6)
        assert solution.converged == bool((true <= tolerance).all())
        assert solution.iterations < 2000  # a row that gains nothing is left alone


def test_without_gradients_and_with_gradients_of_the_caller():
    matrix, _ = with_eigenvalues(CONDITIONED)
    weight = matrix.clone().requires_grad_()
    b = rows(1, 40).requires_grad_()
    with torch.no_grad():
        without = conjugate_gradients(lambda v: v @ weight, b).x
    with_ = conjugate_gradients(lambda v: v @ weight, b).x
    assert not with_.requires_grad
    torch.testing.assert_close(with_, without)


def test_wrong_arguments():
    with pytest.raises(NonFiniteError, match="product of the operator"):
        conjugate_gradients(lambda v: v * float("nan"), torch.ones(1, 3))
    with pytest.raises(NonFiniteError, match="right-hand side"):
        conjugate_gradients(lambda v: v, torch.tensor([[float("nan")]]))
