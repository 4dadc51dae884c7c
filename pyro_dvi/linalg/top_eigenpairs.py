# SPDX-License-Identifier: Apache-2.0
"""The largest eigenpairs of a symmetric matrix, by block Lanczos with thick restarts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dvi.errors import ArgumentError
from pyro_dvi.linalg.operator import Operator, apply, gaussian_rows

_BLOCK = 16  # vectors applied together
_BUDGET = 400  # applications, and 20 for each pair


@dataclass(frozen=True)
class Eigenpairs:
    r"""The eigenpairs found, with :math:`A v_i \approx \lambda_i v_i` and orthonormal :math:`v_i`.

    Attributes:
        values: ``[k]``, descending.
        vectors: the rows v, ``[k, D]``.
        residuals: :math:`|A v_i - \lambda_i v_i|`, ``[k]``; an eigenvalue lies within that distance of each value.
        converged: every residual is within the tolerance.
        applications: vectors that the operator was applied to.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    converged: bool
    applications: int


def top_eigenpairs(operator: Operator, like: Tensor, k: int, *, tolerance: float = 1e-4) -> Eigenpairs:
    r"""Return the k algebraically largest eigenvalues of a symmetric matrix and their eigenvectors.

    The space V grows by blocks Q, the part of :math:`A Q_-` that is orthogonal to it; the pairs are the eigenpairs of
    :math:`H = V A V^\top`. Both V and :math:`A V` are kept, so that residuals need no further application. When V is
    full, it restarts with its best vectors, which loses nothing of them.

    Status: exact to the tolerance where ``converged``; the error of a separated value is the square of its residual
    over the gap. Of an eigenvalue that occurs more than 16 times, copies can be missed.

    Args:
        operator: A, symmetric; positive semi-definite in the usual case of a Gauss-Newton matrix.
        like: vector ``[D]`` with the dtype and device to use.
        k: pairs wanted, at most D.
        tolerance: bound on the residuals relative to the largest ``|value|``; float32 reaches about 1e-6.

    Raises:
        ArgumentError: k is out of range.

    Source: Wu & Simon (2000) for the thick restart; Golub & Van Loan (2013), Section 10.3, for blocks.

    Example:
        >>> diagonal = torch.arange(1.0, 101.0)
        >>> top_eigenpairs(lambda v: v * diagonal, diagonal, 3).values.round(decimals=2)
        tensor([100.,  99.,  98.])
    """
    dim = len(like)
    if not 1 <= k <= dim:
        raise ArgumentError(f"k lies between 1 and the dimension {dim}, got {k}")
    block = min(k, _BLOCK)
    generator = torch.Generator().manual_seed(0)
    budget, applications = 20 * k + _BUDGET, 0
    keep, capacity = k + block, min(dim, 2 * k + 4 * block)
    basis = products = like.new_empty(0, dim)
    q = _orthonormal(gaussian_rows(block, dim, like, generator), basis, 0.0)
    while True:
        product = apply(operator, q)
        applications += len(q)
        basis, products = torch.cat([basis, q]), torch.cat([products, product])
        projected = (basis @ products.T).cpu().double()
        values, vectors = torch.linalg.eigh(0.5 * (projected + projected.T))
        scale, best = float(values.abs().max()), vectors.T.flip(0)[:keep].to(like)
        top, found, moved = values.flip(0)[:k].to(like), best @ basis, best @ products
        residuals = (moved[:k] - top.unsqueeze(1) * found[:k]).norm(dim=1)
        converged = len(values) >= k and float(residuals.max()) <= tolerance * scale
        if converged or len(basis) == dim or applications >= budget:
            return Eigenpairs(top, found[:k], residuals, converged or len(basis) == dim, applications)
        following = _orthonormal(product, basis, scale)
        # An invariant space that is too small or not known to be the top one: look elsewhere.
        if not len(following):
            following = _orthonormal(gaussian_rows(block, dim, like, generator), basis, 0.0)
        if len(basis) + len(following) > capacity and len(basis) > keep:
            basis, products = found, moved
        q = following[: dim - len(basis)]


def _orthonormal(rows: Tensor, basis: Tensor, scale: float) -> Tensor:
    """Return an orthonormal basis of the rows' part outside ``basis``, without what is rounding error of ``scale``."""
    for _ in range(2):
        rows = rows - (rows @ basis.T) @ basis
        q, r = torch.linalg.qr(rows.T)
        real = r.diagonal().abs() > 32 * torch.finfo(rows.dtype).eps * scale
        rows, scale = q.T[real], 0.0
    return rows
