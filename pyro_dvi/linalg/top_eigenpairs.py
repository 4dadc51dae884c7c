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


def top_eigenpairs(
    operator: Operator,
    dim: int,
    k: int,
    *,
    tolerance: float = 1e-4,
    like: Tensor | None = None,
) -> Eigenpairs:
    r"""Return the k algebraically largest eigenvalues of a symmetric matrix and their eigenvectors.

    The space V grows by blocks Q, the part of :math:`A Q_-` that is orthogonal to it; the pairs are those of
    :math:`H = V A V^\top`. With the factor R of the next block, a pair :math:`(\theta, V^\top u)` has the residual
    :math:`|R\,u_{\mathrm{last}}|`, so that watching convergence costs no application. When V is full, it restarts with
    its best vectors, which loses nothing of them.

    Status: exact to the tolerance where ``converged``; the error of a separated value is the square of its residual
    over the gap. Of an eigenvalue that occurs more than 16 times, copies can be missed.

    Args:
        operator: A, symmetric; positive semi-definite in the usual case of a Gauss-Newton matrix.
        dim: D.
        k: pairs wanted, at most ``dim``.
        tolerance: bound on the residuals relative to the largest ``|value|``; float32 reaches about 1e-6.
        like: tensor whose dtype and device are used; the default dtype on the CPU otherwise.

    Raises:
        ArgumentError: k is out of range.

    Source: Wu & Simon (2000) for the thick restart; Golub & Van Loan (2013), Section 10.3, for blocks.

    Example:
        >>> diagonal = torch.arange(1.0, 101.0)
        >>> top_eigenpairs(lambda v: v * diagonal, 100, 3, like=diagonal).values.round(decimals=2)
        tensor([100.,  99.,  98.])
    """
    if not 1 <= k <= dim:
        raise ArgumentError(f"k lies between 1 and the dimension {dim}, got {k}")
    block = min(k, _BLOCK)
    like = torch.empty(0) if like is None else like
    generator = torch.Generator().manual_seed(0)
    budget = 20 * k + _BUDGET
    keep, capacity = k + block, min(dim, 2 * k + 4 * block)

    basis = like.new_empty(0, dim)
    projected = torch.zeros(0, 0, dtype=torch.float64)
    q = _orthonormal(gaussian_rows(block, dim, like, generator), basis, 0.0)
    applications = 0
    while True:
        products = apply(operator, q)
        applications += len(q)
        basis = torch.cat([basis, q])
        projected = _bordered(projected, (basis @ products.T).cpu().double())
        values, vectors = torch.linalg.eigh(projected)
        scale = float(values.abs().max())
        remainder = products - (products @ basis.T) @ basis
        following = _orthonormal(remainder, basis, scale)
        coupling = (following @ products.T).cpu().double()  # R: what A Q has outside V
        residuals = (coupling @ vectors[-len(q) :]).norm(dim=0)
        converged = len(values) >= k and float(residuals[-k:].max()) <= tolerance * scale
        if converged or len(basis) == dim or applications >= budget:
            break
        # An invariant space that is too small or not known to be the top one: look elsewhere.
        if not len(following):
            following = _orthonormal(gaussian_rows(block, dim, like, generator), basis, 0.0)
        if len(basis) + len(following) > capacity and len(basis) > keep:
            basis = vectors[:, -keep:].T.to(basis) @ basis
            projected = values[-keep:].diag()
        q = following[: dim - len(basis)]
    top = slice(-k, None)
    return Eigenpairs(
        values[top].flip(0).to(like),
        (vectors[:, top].T.flip(0).to(basis)) @ basis,
        residuals[top].flip(0).to(like),
        bool(converged or len(basis) == dim),
        applications,
    )


def _orthonormal(rows: Tensor, basis: Tensor, scale: float) -> Tensor:
    """Return an orthonormal basis of the rows' part outside ``basis``, without what is rounding error of ``scale``."""
    for _ in range(2):
        rows = rows - (rows @ basis.T) @ basis
        q, r = torch.linalg.qr(rows.T)
        real = r.diagonal().abs() > 32 * torch.finfo(rows.dtype).eps * scale
        rows, scale = q.T[real], 0.0
    return rows


def _bordered(matrix: Tensor, columns: Tensor) -> Tensor:
    """Return the symmetric matrix with ``columns`` (which end with the new square block) added."""
    old, new = len(matrix), columns.shape[1]
    larger = columns.new_zeros(old + new, old + new)
    larger[:old, :old] = matrix
    larger[:, old:] = columns
    larger[old:, :old] = columns[:old].T
    larger[old:, old:] = (columns[old:] + columns[old:].T) / 2
    return larger
