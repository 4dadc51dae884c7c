# SPDX-License-Identifier: Apache-2.0
"""Matrices that are available only as products with vectors, and linear solves A X = B with such matrices."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dvi.errors import NonFiniteError, NotPositiveDefiniteError

Operator = Callable[[Tensor], Tensor]
"""A symmetric matrix A as a function ``[S, D] -> [S, D]`` that maps each row v to A v.

The operator is called in the caller's gradient mode. An operator that differentiates must use ``torch.enable_grad``.
"""


def apply(operator: Operator, vectors: Tensor) -> Tensor:
    """Return the products ``[S, D]`` with the rows of ``vectors``, after checking that they are finite.

    Raises:
        NonFiniteError: a product is NaN or infinite.
    """
    products = operator(vectors).detach()
    if not bool(products.sum().isfinite()) and not bool(products.isfinite().all()):
        raise NonFiniteError("the product of the operator with a finite vector is NaN or infinite")
    return products.to(vectors)


def identity_rows(like: Tensor, at_once: int = 256) -> Iterator[Tensor]:
    """Yield the rows of the identity ``[D, D]`` for a vector ``[D]``, at most ``at_once`` at a time."""
    size = len(like)
    for start in range(0, size, at_once):
        rows = like.new_zeros(min(at_once, size - start), size)
        rows.diagonal(start).fill_(1)
        yield rows


def gaussian_rows(count: int, dim: int, like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Return standard normal rows ``[count, dim]`` with the dtype and device of ``like``.

    They are drawn on the device of the generator, so that one seed gives the same rows for any device of ``like``.
    Without a generator, the seed is fixed, so that equal calls give equal results. This suits callers that need generic
    vectors, such as starting vectors.
    """
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    rows = torch.randn(count, dim, generator=generator, dtype=like.dtype, device=generator.device)
    return rows.to(like.device)


@dataclass(frozen=True)
class Solution:
    """Result of :func:`conjugate_gradients`.

    Attributes:
        x: the solutions, ``[S, D]``.
        iterations: number of calls of the operator in the recursion.
        residuals: relative residual ``|b - A x| / |b|`` of each row, ``[S]``, recomputed from x; zero if b is zero.
        converged: every residual is within the tolerance.
    """

    x: Tensor
    iterations: int
    residuals: Tensor
    converged: bool


def conjugate_gradients(
    operator: Operator, rhs: Tensor, *, tolerance: float = 1e-6, max_iterations: int | None = None
) -> Solution:
    r"""Solve :math:`A x_s = b_s` for symmetric positive definite A with block conjugate gradients.

    Starting from the QR factorisation :math:`Q C = B` and S = Q, with vectors as columns of matrices,

    .. math::
        \Xi = (S^\top A S)^{-1}, \quad X \leftarrow X + S\,\Xi\,C, \quad
        Q\,Z \leftarrow Q - A S\,\Xi \;\text{ (QR)}, \quad S \leftarrow Q + S Z^\top, \quad C \leftarrow Z C .

    The norm of each column of C equals the norm of the residual of its right-hand side. Suppose that the matrix is the
    identity except in some directions, such as a prior precision plus the information in the data. Then S right-hand
    sides together take about 1/S of the iterations that a single one takes. Right-hand sides may be linearly dependent.
    Each iteration costs :math:`O(S^2 D)` in addition to the products. In finite precision, the recursion's residual
    drifts away from :math:`b - A x`. When the recursion ends, the residual is therefore recomputed, with one more
    application of A. Rows whose residuals exceed the tolerance then restart from their x, as long as each restart at
    least halves their residuals.

    Status: exact up to the tolerance if ``converged``.

    Args:
        operator: A, symmetric positive definite.
        rhs: the rows b, ``[S, D]``; they determine dtype and device.
        tolerance: bound on ``|b - A x| / |b|`` of each row. The attainable value is about ``eps |A| |x| / |b|``; in
            float32, this is 1e-5 rather than 1e-6 for a condition number of 1,000.
        max_iterations: maximum number of iterations; by default, ``min(10 D, 1000)``. In exact arithmetic, D iterations
            are enough.

    Raises:
        NotPositiveDefiniteError: the curvature in some direction is negative, or not larger than the rounding error;
            the exception has the attributes ``direction`` and ``curvature``.
        NonFiniteError: a right-hand side or a product is NaN or infinite.

    Source: Hestenes & Stiefel (1952); O'Leary (1980) for blocks; Dubrulle (2001) for the form with QR factorisations,
        which does not break down.

    Example:
        >>> precision = torch.tensor([[4.0, 1.0], [1.0, 3.0]])
        >>> conjugate_gradients(lambda v: v @ precision, torch.tensor([[1.0, 2.0]])).x
        tensor([[0.0909, 0.6364]])
    """
    rhs = rhs.detach()
    limit = min(10 * rhs.shape[-1], 1000) if max_iterations is None else max_iterations
    norms = rhs.norm(dim=-1)
    if not bool(norms.isfinite().all()):
        raise NonFiniteError("a right-hand side is NaN or infinite (or its square overflows)")
    x, residual, sizes, iterations = torch.zeros_like(rhs), rhs, norms.clone(), 0
    targets = tolerance * norms
    rows = (sizes > targets).nonzero()[:, 0]
    residual = residual[rows]
    while len(rows) and iterations < limit:
        steps, taken = _recursion(operator, residual, targets[rows], limit - iterations)
        x.index_add_(0, rows, steps)
        residual, iterations = rhs[rows] - apply(operator, x[rows]), iterations + taken
        before, after = sizes[rows], residual.norm(dim=-1)
        sizes[rows] = after
        again = (after > targets[rows]) & (after <= before / 2)
        rows, residual = rows[again], residual[again]
    relative = torch.where(norms > 0, sizes / norms, torch.zeros_like(norms))
    return Solution(x, iterations, relative, bool((relative <= tolerance).all()))


def _recursion(operator: Operator, residual: Tensor, targets: Tensor, limit: int) -> tuple[Tensor, int]:
    x, iterations, largest = torch.zeros_like(residual), 0, residual.new_zeros(())
    q, c = torch.linalg.qr(residual.mT)
    s = q
    while True:
        product, iterations = apply(operator, s.mT).mT, iterations + 1
        matrix, gram = s.mT @ product, s.mT @ s
        largest = torch.maximum(largest, (matrix.diagonal() / gram.diagonal()).abs().max())
        factor = _factor(0.5 * (matrix + matrix.mT), torch.finfo(s.dtype).eps * largest * gram, s)
        x = x + (s @ torch.cholesky_solve(c, factor)).mT
        q, z = torch.linalg.qr(q - torch.cholesky_solve(product.mT, factor).mT)
        c = z @ c
        if iterations >= limit or bool((c.norm(dim=0) <= targets).all()):
            return x, iterations
        s = q + s @ z.mT


def _factor(matrix: Tensor, rounding: Tensor, directions: Tensor) -> Tensor:
    """Return the Cholesky factor of a matrix, or raise if it is not positive definite beyond rounding."""
    _, failed = torch.linalg.cholesky_ex(matrix - rounding)
    if not bool(failed):
        return torch.linalg.cholesky_ex(matrix).L
    values, vectors = torch.linalg.eigh(matrix)
    direction = directions @ vectors[:, 0]
    curvature = float(values[0] / direction.square().sum())
    met = f"conjugate gradients found d'A d / d'd = {curvature:.3g}, not above the rounding error of {matrix.dtype}"
    remedy = "reach a minimum first, or use a positive definite matrix such as Gauss-Newton, or float64"
    raise NotPositiveDefiniteError(f"{met}: {remedy}", direction=direction, curvature=curvature)
