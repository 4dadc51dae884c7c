# SPDX-License-Identifier: Apache-2.0
"""The largest eigenpairs against a dense decomposition."""

import pytest
import torch

from pyro_dvi.linalg import lanczos as module
from pyro_dvi.linalg.lanczos import top_eigenpairs
from tests.linalg.matrices import Counting, with_eigenvalues

SPECTRUM = torch.logspace(-4, 3, 300, dtype=torch.float64)  # neighbours differ by five per cent


@pytest.mark.parametrize("k", [1, 5, 40, 300])
def test_equals_the_dense_decomposition(k, monkeypatch):
    monkeypatch.setattr(module, "_BUDGET", 20_000)
    matrix, vectors = with_eigenvalues(SPECTRUM)
    operator = Counting(matrix)
    found = top_eigenpairs(operator, torch.zeros(300, dtype=torch.float64), k, tolerance=1e-08)
    assert found.converged and found.applications == operator.vectors
    torch.testing.assert_close(found.values, SPECTRUM.flip(0)[:k], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        found.vectors @ found.vectors.T, torch.eye(k, dtype=torch.float64), rtol=0, atol=1e-11
    )
    separated = min(k, 40)  # where the gap exceeds the residual by far
    overlap = (found.vectors[:separated] * vectors.flip(0)[:separated]).sum(-1).abs()
    assert float(overlap.min()) > 1 - 1e-8
    true = (found.vectors @ matrix - found.values[:, None] * found.vectors).norm(dim=-1)
    torch.testing.assert_close(found.residuals, true, rtol=1e-3, atol=1e-9)


def test_needs_fewer_applications_than_the_dimension():
    matrix, _ = with_eigenvalues(SPECTRUM)
    assert top_eigenpairs(lambda v: v @ matrix, torch.zeros(300, dtype=torch.float64), 10).applications < 150


def test_low_rank_and_repeated_eigenvalues():
    spectrum = torch.zeros(50, dtype=torch.float64)
    spectrum[:3] = 2.0
    spectrum[3] = 5.0
    matrix, _ = with_eigenvalues(spectrum)
    found = top_eigenpairs(lambda v: v @ matrix, torch.zeros(50, dtype=torch.float64), 8, tolerance=1e-10)
    expected = torch.tensor([5.0, 2, 2, 2, 0, 0, 0, 0], dtype=torch.float64)
    torch.testing.assert_close(found.values, expected, rtol=0, atol=1e-10)
    assert found.converged
    identity = top_eigenpairs(lambda v: v, torch.zeros(9), 4)
    torch.testing.assert_close(identity.values, torch.ones(4))
    torch.testing.assert_close(identity.vectors @ identity.vectors.T, torch.eye(4), rtol=0, atol=1e-5)
    nothing = top_eigenpairs(torch.zeros_like, torch.zeros(6), 2)
    assert nothing.converged and nothing.values.tolist() == [0.0, 0.0]


def test_indefinite_matrices_give_the_algebraically_largest():
    matrix, _ = with_eigenvalues(torch.linspace(-100, 3, 40, dtype=torch.float64))
    found = top_eigenpairs(lambda v: v @ matrix, torch.zeros(40, dtype=torch.float64), 2, tolerance=1e-09)
    torch.testing.assert_close(found.values, torch.linspace(-100, 3, 40, dtype=torch.float64).flip(0)[:2])


def test_float32_meets_its_tolerance_and_says_when_it_cannot():
    matrix, _ = with_eigenvalues(SPECTRUM)
    single = matrix.float()
    found = top_eigenpairs(lambda v: v @ single, torch.zeros(300), 20, tolerance=1e-05)
    assert found.converged and found.vectors.dtype == torch.float32
    torch.testing.assert_close(found.values.double(), SPECTRUM.flip(0)[:20], rtol=1e-5, atol=0)
    short = top_eigenpairs(lambda v: v @ single, torch.zeros(300), 20, tolerance=1e-09)
    assert not short.converged and float(short.residuals.max()) > 1e-9 * 1000


def test_one_dimension_and_seeds():
    found = top_eigenpairs(lambda v: -3 * v, torch.zeros(1), 1)
    assert found.values.tolist() == [-3.0] and found.converged
    matrix, _ = with_eigenvalues(SPECTRUM)
    once, twice = (
        top_eigenpairs(lambda v: v @ matrix, torch.zeros(300, dtype=torch.float64), 3).vectors
        for _ in range(2)
    )
    assert torch.equal(once, twice)
