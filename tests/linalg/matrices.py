# SPDX-License-Identifier: Apache-2.0
"""Matrices of known spectrum, and an operator that counts what is asked of it."""

import torch
from torch import Tensor


def with_eigenvalues(eigenvalues: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A dense symmetric matrix and its eigenvectors in rows, rotated by a random orthogonal matrix."""
    generator = torch.Generator().manual_seed(seed)
    gaussian = torch.randn(len(eigenvalues), len(eigenvalues), generator=generator, dtype=eigenvalues.dtype)
    vectors = torch.linalg.qr(gaussian).Q.T
    matrix = vectors.T @ (eigenvalues[:, None] * vectors)
    return (matrix + matrix.T) / 2, vectors


def rows(count: int, dim: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class Counting:
    """The operator of a dense matrix, with the numbers of calls and of vectors."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix, self.calls, self.vectors = matrix, 0, 0
        self.sizes: list[int] = []

    def __call__(self, vectors: Tensor) -> Tensor:
        self.calls += 1
        self.vectors += len(vectors)
        self.sizes.append(len(vectors))
        return vectors @ self.matrix


class Root:
    """The metric M = R'R."""

    def __init__(self, root: Tensor) -> None:
        self.inverse = torch.linalg.inv(root)

    def coloured(self, rows: Tensor) -> Tensor:
        return rows @ self.inverse.mT

    def whitened(self, rows: Tensor) -> Tensor:
        return rows @ self.inverse
