# SPDX-License-Identifier: Apache-2.0
"""Solve A x = b with products only, for several right-hand sides at once."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pyro_dvi.errors import ArgumentError, NonFiniteError, NotPositiveDefiniteError
from pyro_dvi.linalg.operator import Operator, apply, dots

Preconditioner = Tensor | Callable[[Tensor], Tensor]
"""A positive definite M close to A: its diagonal ``[D]``, or a function of rows that applies the inverse of M."""

Recursion = Callable[[Operator, Tensor, Tensor, int], tuple[Tensor, int, int]]
"""From A, residuals r, bounds on their norms and a number of iterations: the solutions of A x = r, how many iterations
they took, and how many vectors A was applied to."""


@dataclass(frozen=True)
class Solution:
    """What :func:`conjugate_gradients` found.

    Attributes:
        x: the solutions, ``[S, D]``.
        iterations: calls of the operator within the recursion; the longest row counts.
        residuals: ``|b - A x| / |b|`` of each row, ``[S]``, computed afresh from x; zero where b is zero.
        converged: whether every residual is within the tolerance.
        applications: vectors that the operator was applied to, all rows together.
    """

    x: Tensor
    iterations: int
    residuals: Tensor
    converged: bool
    applications: int


def conjugate_gradients(
    operator: Operator,
    rhs: Tensor,
    *,
    tolerance: float = 1e-6,
    max_iterations: int | None = None,
    preconditioner: Preconditioner | None = None,
    start: Tensor | None = None,
) -> Solution:
    r"""Solve :math:`A x_s = b_s` for symmetric positive definite A.

    .. math::
        x \leftarrow x + \frac{r^\top z}{d^\top A d}\,d, \qquad r = b - A x, \quad z = M^{-1} r, \quad
        d \leftarrow z + \frac{r^\top z}{r_-^\top z_-}\,d

    A row that has converged is no longer applied. The recursion's residual drifts away from :math:`b - A x` in
    finite precision, so the latter is computed when the recursion ends (one application more), and a row that is not
    there yet starts again from its x, as long as that at least halves its residual.

    Status: exact to the tolerance where ``converged``. Otherwise x is the best of its Krylov space by its error
    in the norm of A; its residual need not be small.

    Args:
        operator: A, symmetric positive definite.
        rhs: the rows b, ``[S, D]``; dtype and device of everything follow it.
        tolerance: bound on ``|b - A x| / |b|`` of each row. What can be reached is about ``eps |A| |x| / |b|``: in
            float32 1e-5 rather than 1e-6 for a condition number of 1,000.
        max_iterations: the default is ``min(10 D, 1000)``: D suffice in exact arithmetic.
        preconditioner: see :data:`Preconditioner`.
        start: where to start, ``[S, D]``; zero by default.

    Raises:
        NotPositiveDefiniteError: a direction has a curvature that is negative, or not larger than the rounding error;
            the error carries ``direction`` and ``curvature``.
        ArgumentError: a shape is wrong, or the preconditioner is not positive definite.
        NonFiniteError: a right-hand side or a product is NaN or infinite.

    Source: Hestenes & Stiefel (1952); Saad (2003), Alg. 9.1.

    Example:
        >>> precision = torch.tensor([[4.0, 1.0], [1.0, 3.0]])
        >>> conjugate_gradients(lambda v: v @ precision, torch.tensor([[1.0, 2.0]])).x
        tensor([[0.0909, 0.6364]])
    """
    found = partial(_recursion, _solver(preconditioner, rhs))
    return solve_by(found, operator, rhs, tolerance=tolerance, max_iterations=max_iterations, start=start)


def solve_by(
    recursion: Recursion,
    operator: Operator,
    rhs: Tensor,
    *,
    tolerance: float,
    max_iterations: int | None,
    start: Tensor | None = None,
) -> Solution:
    """Run a recursion, compute the residuals that it leaves, and run it again on what is not there yet.

    Args:
        recursion: see :data:`Recursion`.
        operator: A.
        rhs: the rows b, ``[S, D]``.
        tolerance: bound on ``|b - A x| / |b|`` of each row.
        max_iterations: of all runs; see :func:`conjugate_gradients`.
        start: likewise.
    """
    rhs = rhs.detach()
    if rhs.dim() != 2 or not rhs.is_floating_point():
        raise ArgumentError(f"rhs holds real rows [S, D], got {rhs.dtype} of shape {tuple(rhs.shape)}")
    if start is not None and start.shape != rhs.shape:
        raise ArgumentError(f"start has shape {tuple(start.shape)}, rhs {tuple(rhs.shape)}")
    limit = min(10 * rhs.shape[-1], 1000) if max_iterations is None else max_iterations
    norms = rhs.norm(dim=-1)
    if not bool(norms.isfinite().all()):
        raise NonFiniteError("a right-hand side is NaN or infinite (or its square overflows)")
    if start is None:
        x, residual, applications = torch.zeros_like(rhs), rhs, 0
    else:
        x = start.detach().to(rhs) * (norms > 0).unsqueeze(-1)  # the solution for b = 0 is known
        residual, applications = rhs - apply(operator, x), len(rhs)
    sizes, targets, iterations = residual.norm(dim=-1), tolerance * norms, 0
    rows = (sizes > targets).nonzero()[:, 0]
    residual = residual[rows]
    while len(rows) and iterations < limit:
        steps, taken, applied = recursion(operator, residual, targets[rows], limit - iterations)
        x.index_add_(0, rows, steps)
        residual = rhs[rows] - apply(operator, x[rows])
        iterations, applications = iterations + taken, applications + applied + len(rows)
        before, after = sizes[rows], residual.norm(dim=-1)
        sizes[rows] = after
        again = (after > targets[rows]) & (after <= before / 2)
        rows, residual = rows[again], residual[again]
    relative = torch.where(norms > 0, sizes / norms, torch.zeros_like(norms))
    return Solution(x, iterations, relative, bool((relative <= tolerance).all()), applications)


def _recursion(
    solve: Callable[[Tensor], Tensor], operator: Operator, r: Tensor, targets: Tensor, limit: int
) -> tuple[Tensor, int, int]:
    """Conjugate gradients on the rows that are still active, from residuals, which are overwritten."""
    x, rows = torch.zeros_like(r), torch.arange(len(r), device=r.device)
    iterations = applications = 0
    z = solve(r)
    d, rz = z.clone(), _positive(dots(r, z))
    d_squared, largest = rz, torch.zeros_like(rz)  # |d|^2 in the norm of M, by its recurrence
    while True:
        product = apply(operator, d)
        iterations, applications = iterations + 1, applications + len(d)
        curvature = dots(d, product)
        largest = torch.maximum(largest, (curvature / d_squared).abs())
        _check_positive(d, curvature, torch.finfo(d.dtype).eps * largest * d_squared)
        step = (rz / curvature).unsqueeze(-1)
        if len(rows) == len(x):  # in place: for large D, fresh memory costs more than the arithmetic
            x.addcmul_(step, d)
        else:
            x.index_add_(0, rows, step * d)
        r.addcmul_(step, product, value=-1)
        active = r.norm(dim=-1) > targets
        if not bool(active.any()) or iterations >= limit:
            return x, iterations, applications
        if not bool(active.all()):
            rows, targets, r, d = rows[active], targets[active], r[active], d[active]
            rz, d_squared, largest = rz[active], d_squared[active], largest[active]
        z = solve(r)
        before, rz = rz, _positive(dots(r, z))
        d.mul_((rz / before).unsqueeze(-1)).add_(z)
        d_squared = rz + (rz / before).square() * d_squared


def _solver(preconditioner: Preconditioner | None, rhs: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the function that applies the inverse of M to rows."""
    if preconditioner is None:
        return lambda r: r
    if not isinstance(preconditioner, Tensor):
        given = preconditioner
        return lambda r: apply(given, r)
    diagonal = preconditioner.detach().to(rhs)
    if diagonal.shape != rhs.shape[-1:]:
        raise ArgumentError(
            f"the preconditioner's diagonal has shape {tuple(diagonal.shape)}, not {tuple(rhs.shape[-1:])}"
        )
    return lambda r: r / diagonal


def _positive(rz: Tensor) -> Tensor:
    if not bool((rz > 0).all()):
        raise ArgumentError(
            "the preconditioner is not positive definite: r'M^-1 r <= 0 for a residual r. Pass a positive diagonal or "
            "the inverse of a positive definite matrix."
        )
    return rz


def _check_positive(d: Tensor, curvature: Tensor, rounding: Tensor) -> None:
    if not bool((curvature <= rounding).any()):
        return
    row = int((curvature - rounding).argmin())
    quotient = float(curvature[row] / d[row].square().sum())
    raise NotPositiveDefiniteError(
        f"conjugate gradients met a direction d with d'A d / d'd = {quotient:.3g}, which is not above the rounding "
        f"error of {d.dtype}. Reach a minimum first (minimise_newton), or use a positive definite curvature (the "
        "Gauss-Newton matrix, a damped Hessian); where the matrix is known to be positive, use float64.",
        direction=d[row].clone(),
        curvature=quotient,
    )
