# SPDX-License-Identifier: Apache-2.0
"""Block conjugate gradients against dense solves."""

import pytest
import torch

from pyro_dvi.errors import NonFiniteError, NotPositiveDefiniteError
from pyro_dvi.linalg import block_conjugate_gradients, conjugate_gradients


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
    found = block_conjugate_gradients(lambda v: v @ matrix, rhs, tolerance=tolerance)
    assert found.converged
    residuals = (rhs - found.x @ matrix).norm(dim=1)
    assert bool((residuals <= 2 * tolerance * rhs.norm(dim=1)).all())
    expected = torch.linalg.solve(matrix.double(), rhs.double().T).T
    assert float((found.x - expected).norm()) <= 2 * tolerance * float(rhs.double().norm())


def test_many_right_hand_sides_take_fewer_iterations_than_one_by_one() -> None:
    matrix = prior_with_data(300, 120)
    rhs = torch.randn(40, 300, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    block = block_conjugate_gradients(lambda v: v @ matrix, rhs)
    single = conjugate_gradients(lambda v: v @ matrix, rhs)
    assert block.converged and single.converged
    assert 4 * block.iterations < single.iterations


def test_an_indefinite_matrix_gives_a_direction_of_negative_curvature() -> None:
    matrix = torch.diag(torch.tensor([3.0, 1.0, -0.5, 2.0], dtype=torch.float64))
    with pytest.raises(NotPositiveDefiniteError, match="d'A d") as caught:
        block_conjugate_gradients(lambda v: v @ matrix, torch.ones(1, 4, dtype=torch.float64))
    direction = caught.value.direction
    assert float(direction @ matrix @ direction) < 0
    assert caught.value.curvature == pytest.approx(
        float(direction @ matrix @ direction / direction.square().sum())
    )


def test_an_unfinished_solve_says_so_and_nan_is_refused() -> None:
    matrix = prior_with_data(50, 20)
    found = block_conjugate_gradients(lambda v: v @ matrix, torch.ones(1, 50).double(), max_iterations=2)
    assert not found.converged and found.iterations == 2
    with pytest.raises(NonFiniteError):
        block_conjugate_gradients(lambda v: v @ matrix, torch.full((1, 50), torch.nan).double())
