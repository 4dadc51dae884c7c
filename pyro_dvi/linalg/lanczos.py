# SPDX-License-Identifier: Apache-2.0
"""A symmetric matrix seen from one vector: its tridiagonal form on a Krylov space."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dvi.core.arguments import check_count
from pyro_dvi.errors import ArgumentError, NonFiniteError
from pyro_dvi.linalg.operator import Operator, apply, dots


@dataclass(frozen=True)
class Tridiagonal:
    r"""The relation :math:`A Q = Q T + \rho\, q e_k^\top` with orthonormal rows Q.

    Attributes:
        diagonal: of T, ``[k]``; k is smaller than the steps asked for where the Krylov space ended.
        off_diagonal: of T, ``[k - 1]``.
        basis: Q, ``[k, D]``; its first row is the normalised start.
        remainder: rho, zero where the space is invariant.
    """

    diagonal: Tensor
    off_diagonal: Tensor
    basis: Tensor
    remainder: float

    def dense(self) -> Tensor:
        """Return T, ``[k, k]``."""
        return self.diagonal.diag() + self.off_diagonal.diag(1) + self.off_diagonal.diag(-1)


class LanczosProcess:
    r"""The Lanczos recursion of several starts at once, one application per :meth:`advance`.

    .. math::
        \beta_k\, q_{k+1} = A q_k - \alpha_k q_k - \beta_{k-1} q_{k-1}, \qquad \alpha_k = q_k^\top A q_k

    Each new vector is orthogonalised against all earlier ones, twice. A row ends where beta is not above the
    rounding error: its Krylov space is invariant, and it is applied no more.

    Args:
        operator: A.
        starts: one start a row, ``[S, D]``, not zero.
        capacity: the largest number of steps; ``S * capacity * D`` numbers are held.
    """

    def __init__(self, operator: Operator, starts: Tensor, capacity: int) -> None:
        starts = starts.detach()
        norms = starts.norm(dim=-1, keepdim=True)
        if not bool(norms.isfinite().all()):
            raise NonFiniteError("a start of the Lanczos recursion is NaN or infinite")
        if not bool((norms > 0).all()):
            raise ArgumentError("a Krylov space needs a start that is not zero")
        self.capacity = min(capacity, starts.shape[-1])
        self.operator = operator
        self.basis = starts.new_empty(len(starts), self.capacity, starts.shape[-1])
        self.basis[:, 0] = starts / norms
        # The small matrices live on the CPU in float64, where their decompositions are fastest and most exact.
        self.diagonal = torch.zeros(len(starts), self.capacity, dtype=torch.float64)
        self.off_diagonal = torch.zeros_like(self.diagonal)  # the last entry couples to the next vector
        self.lengths = torch.zeros(len(starts), dtype=torch.long)
        self.active = torch.arange(len(starts))
        self.steps = self.applications = 0

    @property
    def finished(self) -> bool:
        """Whether no row can advance: the capacity is used, or every space is invariant."""
        return self.steps == self.capacity or not len(self.active)

    def advance(self) -> None:
        """Extend the space of each active row by one vector."""
        k, rows = self.steps, self.active
        every = len(rows) == len(self.basis)
        earlier = (self.basis if every else self.basis[rows])[:, : k + 1]
        q = earlier[:, k]
        product = apply(self.operator, q)
        self.applications += len(rows)
        alpha = dots(q, product)
        w = product - alpha.unsqueeze(-1) * q
        for _ in range(2):
            w = w - (earlier.transpose(1, 2) @ (earlier @ w.unsqueeze(-1))).squeeze(-1)
        beta = w.norm(dim=-1)
        self.diagonal[rows, k] = alpha.cpu().double()
        self.lengths[rows] = self.steps = k + 1
        scale = self.diagonal[rows].abs().amax(-1) + self.off_diagonal[rows].amax(-1)
        remains = beta.cpu().double() > 32 * torch.finfo(w.dtype).eps * scale
        remains &= k + 1 < self.basis.shape[-1]
        self.off_diagonal[rows, k] = torch.where(remains, beta.cpu().double(), 0.0)
        self.active = rows[remains]
        if k + 1 < self.capacity:
            kept = remains.to(w.device)
            self.basis[self.active, k + 1] = w[kept] / beta[kept].unsqueeze(-1)

    def tridiagonal(self, row: int = 0) -> Tridiagonal:
        """Return what row ``row`` has so far."""
        k = int(self.lengths[row])
        return Tridiagonal(
            self.diagonal[row, :k],
            self.off_diagonal[row, : k - 1],
            self.basis[row, :k],
            float(self.off_diagonal[row, k - 1]),
        )


def lanczos(operator: Operator, start: Tensor, steps: int) -> Tridiagonal:
    r"""Reduce a symmetric matrix to tridiagonal form on the Krylov space of ``start``.

    .. math::
        T = Q A Q^\top, \qquad \operatorname{rows}(Q) \text{ span } \{b, Ab, \dots, A^{k-1} b\}

    Status: exact up to rounding, with full re-orthogonalisation: no repeated eigenvalues. Holds ``steps * D`` numbers.

    Args:
        operator: A, symmetric; it may be indefinite.
        start: b, ``[D]``, not zero.
        steps: applications at most, one vector each; fewer where the space is invariant earlier.

    Returns:
        T in float64 on the CPU, Q with dtype and device of the start.

    Raises:
        ArgumentError: the start is zero or not a vector, or there is no step.

    Source: Lanczos (1950); Golub & Van Loan (2013), Section 10.3, for the re-orthogonalisation.

    Example:
        >>> start = torch.tensor([1.0, 0.0, 1.0])  # no part in the second direction
        >>> reduced = lanczos(lambda v: v * torch.tensor([1.0, 2.0, 3.0]), start, steps=3)
        >>> torch.linalg.eigvalsh(reduced.dense()).round(decimals=4).tolist()
        [1.0, 3.0]
    """
    if start.dim() != 1:
        raise ArgumentError(f"start is one vector [D], got shape {tuple(start.shape)}")
    check_count("steps", steps)
    process = LanczosProcess(operator, start.unsqueeze(0), steps)
    while not process.finished:
        process.advance()
    return process.tridiagonal()
