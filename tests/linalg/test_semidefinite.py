# SPDX-License-Identifier: Apache-2.0
"""Eigenvectors of matrices of low rank, where the decomposition of float32 can fail to converge."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pyro_dvi.errors import NotPositiveDefiniteError
from pyro_dvi.linalg.semidefinite import eigen


def low_rank(seed: int, size: int = 300) -> Tensor:
    """One row of rectified inputs, half of them zero for dead units; torch fails for about a third of these."""
    torch.manual_seed(seed)
    row = torch.relu(torch.randn(size) - 1)
    row[size // 2 :] = 0
    return torch.outer(row, row)


@pytest.mark.parametrize("seed", range(8))
def test_matrices_of_rank_one_are_decomposed(seed: int) -> None:
    matrix = low_rank(seed)
    values, vectors = eigen(matrix)
    torch.testing.assert_close(vectors * values @ vectors.mT, matrix, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(vectors.mT @ vectors, torch.eye(300), atol=1e-5, rtol=0.0)
    assert values.min() >= 0 and values.dtype is torch.float32


@pytest.mark.parametrize("failures", [1, 2])
def test_a_failed_decomposition_is_repeated_in_float64_and_with_separated_eigenvalues(
    monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    torch.manual_seed(0)
    rows = torch.randn(3, 4, 6)  # a batch of matrices of rank four
    matrix, plain, given = rows.mT @ rows, torch.linalg.eigh, []

    def failing(matrix: Tensor) -> Any:
        given.append(matrix)
        if len(given) <= failures:
            raise torch.linalg.LinAlgError("failed to converge")
        return plain(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", failing)
    values, vectors = eigen(matrix)
    assert [m.dtype for m in given] == [torch.float32] + failures * [torch.float64]
    torch.testing.assert_close((vectors * values.unsqueeze(-2)) @ vectors.mT, matrix, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(values, plain(matrix)[0].clamp_min(0), atol=1e-5, rtol=1e-5)


def test_infinite_elements_are_named() -> None:
    with pytest.raises(NotPositiveDefiniteError, match="size 3.*infinite"):
        eigen(torch.full((3, 3), torch.inf))
