# SPDX-License-Identifier: Apache-2.0
"""Conjugate gradients against dense solves."""

import pytest
import torch

from pyro_dvi.errors import ArgumentError, NonFiniteError, NotPositiveDefiniteError
from pyro_dvi.linalg import conjugate_gradients
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


def test_rows_that_have_converged_are_not_applied_and_not_changed():
    matrix, vectors = with_eigenvalues(CONDITIONED)
    easy = vectors[3]  # one step
    medium = vectors[[0, 20, 39]].sum(0)  # three
    b = torch.stack([rows(1, 40)[0], easy, torch.zeros(40, dtype=torch.float64), medium])
    operator = Counting(matrix)
    solution = conjugate_gradients(operator, b, tolerance=1e-11)
    assert operator.sizes[:5] == [3, 2, 2, 1, 1]
    assert operator.sizes[-1] == 3  # the check of the true residuals
    assert solution.applications == operator.vectors
    alone = torch.cat([conjugate_gradients(lambda v: v @ matrix, row[None], tolerance=1e-11).x for row in b])
    torch.testing.assert_close(solution.x, alone, rtol=1e-9, atol=1e-11)
    assert solution.converged


def test_zero_right_hand_side_costs_nothing_and_ignores_the_start():
    operator = Counting(torch.eye(3))
    solution = conjugate_gradients(operator, torch.zeros(2, 3))
    assert operator.calls == 0 and solution.converged and not solution.x.any()
    started = conjugate_gradients(operator, torch.zeros(2, 3), start=torch.ones(2, 3))
    assert started.converged and not started.x.any()


def test_one_dimension():
    solution = conjugate_gradients(lambda v: 4 * v, torch.tensor([[2.0], [-8.0]]))
    torch.testing.assert_close(solution.x, torch.tensor([[0.5], [-2.0]]))


def test_identity_that_returns_its_argument():
    b = rows(2, 7)
    solution = conjugate_gradients(lambda v: v, b)
    torch.testing.assert_close(solution.x, b)
    assert solution.iterations == 1


def test_start_at_the_solution_needs_the_check_only():
    matrix, _ = with_eigenvalues(CONDITIONED)
    x = rows(2, 40)
    operator = Counting(matrix)
    solution = conjugate_gradients(operator, x @ matrix, start=x, tolerance=1e-10)
    assert operator.calls == 1 and solution.iterations == 0 and solution.converged


def test_preconditioner_saves_iterations():
    scales = torch.logspace(0, 3, 40, dtype=torch.float64)
    core, _ = with_eigenvalues(torch.linspace(1, 2, 40, dtype=torch.float64))
    matrix = scales[:, None] * core * scales
    b = rows(3, 40)
    options = {"tolerance": 1e-11, "max_iterations": 2000}
    plain = conjugate_gradients(lambda v: v @ matrix, b, **options)
    diagonal = conjugate_gradients(lambda v: v @ matrix, b, preconditioner=matrix.diagonal(), **options)
    callable_ = conjugate_gradients(
        lambda v: v @ matrix, b, preconditioner=lambda r: r / matrix.diagonal(), **options
    )
    assert diagonal.converged and diagonal.iterations < 30 < plain.iterations
    torch.testing.assert_close(diagonal.x, callable_.x)
    torch.testing.assert_close(diagonal.x, torch.linalg.solve(matrix, b.T).T, rtol=1e-6, atol=1e-10)


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


def test_diagonal_matrix_of_any_scale_is_not_taken_for_indefinite():
    diagonal = torch.logspace(-6, 6, 30)  # beyond what float32 resolves without the preconditioner
    b = rows(2, 30, dtype=torch.float32)
    solution = conjugate_gradients(lambda v: v * diagonal, b, preconditioner=diagonal)
    assert solution.converged
    torch.testing.assert_close(solution.x, b / diagonal)


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
    with pytest.raises(ArgumentError, match="rows"):
        conjugate_gradients(lambda v: v, torch.ones(3))
    with pytest.raises(ArgumentError, match="start has shape"):
        conjugate_gradients(lambda v: v, torch.ones(1, 3), start=torch.ones(1, 2))
    with pytest.raises(ArgumentError, match="became"):
        conjugate_gradients(lambda v: v[:, :2], torch.ones(1, 3))
    with pytest.raises(ArgumentError, match="diagonal has shape"):
        conjugate_gradients(lambda v: v, torch.ones(1, 3), preconditioner=torch.ones(2))
    with pytest.raises(ArgumentError, match="preconditioner is not positive"):
        conjugate_gradients(lambda v: v, torch.ones(1, 3), preconditioner=-torch.ones(3))
    with pytest.raises(NonFiniteError, match="product of the operator"):
        conjugate_gradients(lambda v: v * float("nan"), torch.ones(1, 3))
    with pytest.raises(NonFiniteError, match="right-hand side"):
        conjugate_gradients(lambda v: v, torch.tensor([[float("nan")]]))
