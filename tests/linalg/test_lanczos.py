# SPDX-License-Identifier: Apache-2.0
"""The Lanczos relation, its end, and its extreme values."""

from types import SimpleNamespace

import pytest
import torch

from pyro_dvi.linalg.lanczos import LanczosProcess
from tests.linalg.matrices import Counting, rows, with_eigenvalues


def lanczos(operator, start, steps):
    process = LanczosProcess(operator, start[None], steps)
    while not process.finished:
        process.advance()
    k = int(process.lengths[0])
    matrix = process.tridiagonal()
    return SimpleNamespace(
        matrix=matrix,
        diagonal=matrix.diagonal(),
        basis=process.basis[0, :k],
        remainder=float(process.off_diagonal[0, k - 1]),
    )


INDEFINITE = torch.linspace(-3, 50, 30, dtype=torch.float64)


@pytest.mark.parametrize("steps", [1, 2, 12, 30, 100])
def test_lanczos_relation(steps):
    matrix, _ = with_eigenvalues(INDEFINITE)
    operator = Counting(matrix)
    t = lanczos(operator, rows(1, 30)[0], steps)
    k = min(steps, 30)
    assert t.basis.shape == (k, 30) and operator.calls == k
    torch.testing.assert_close(t.basis @ t.basis.T, torch.eye(k, dtype=torch.float64), rtol=0, atol=1e-13)
    remainder = t.basis @ matrix - t.matrix @ t.basis
    assert k == 1 or float(remainder[:-1].abs().max()) < 1e-11
    assert float(remainder[-1].norm()) == pytest.approx(t.remainder, abs=1e-11)


def test_full_dimension_gives_all_eigenvalues():
    matrix, _ = with_eigenvalues(INDEFINITE)
    t = lanczos(lambda v: v @ matrix, rows(1, 30)[0], 30)
    torch.testing.assert_close(torch.linalg.eigvalsh(t.matrix), INDEFINITE, rtol=1e-11, atol=1e-11)
    assert t.remainder == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_space_of_a_few_eigenvectors_ends_there(dtype):
    matrix, vectors = with_eigenvalues(INDEFINITE)
    for chosen in ([4], [4, 9], [0, 7, 29]):
        start = vectors[chosen].sum(0).to(dtype)
        t = lanczos(lambda v: v @ matrix.to(dtype), start, 20)
        if dtype == torch.float64:
            assert len(t.diagonal) == len(chosen) and t.remainder == 0
        ritz = torch.linalg.eigvalsh(t.matrix)
        nearest = (ritz[:, None] - INDEFINITE[chosen]).abs().amin(0)
        assert float(nearest.max()) < (1e-10 if dtype == torch.float64 else 1e-4)


def test_float32_keeps_its_basis_orthogonal():
    eigenvalues = torch.cat([torch.logspace(-4, 0, 95), torch.tensor([1e2, 1e3, 1e4, 1e5, 1e6])])
    matrix, _ = with_eigenvalues(eigenvalues)
    t = lanczos(lambda v: v @ matrix, rows(1, 100, dtype=torch.float32)[0], 60)
    gram = t.basis @ t.basis.T
    torch.testing.assert_close(gram, torch.eye(len(gram)), rtol=0, atol=1e-5)
    ritz = torch.linalg.eigvalsh(t.matrix)
    assert int((ritz > 50).sum()) == 5  # no ghosts of the large ones


def test_rows_end_separately_and_are_then_left_alone():
    matrix, vectors = with_eigenvalues(INDEFINITE)
    operator = Counting(matrix)
    process = LanczosProcess(operator, torch.stack([vectors[3], rows(1, 30)[0], vectors[[20, 29]].sum(0)]), 8)
    while not process.finished:
        process.advance()
    assert operator.sizes == [3, 2, 1, 1, 1, 1, 1, 1]
    assert process.lengths.tolist() == [1, 8, 2]
    alone = lanczos(lambda v: v @ matrix, rows(1, 30)[0], 8)
    torch.testing.assert_close(process.tridiagonal(1), alone.matrix)
    torch.testing.assert_close(process.basis[1], alone.basis)


def test_zero_matrix_and_one_dimension():
    t = lanczos(torch.zeros_like, torch.ones(5), 5)
    assert t.diagonal.tolist() == [0.0] and t.remainder == 0
    t = lanczos(lambda v: -2 * v, torch.tensor([3.0]), 4)
    assert t.diagonal.tolist() == [-2.0] and t.basis.tolist() == [[1.0]]
