# SPDX-License-Identifier: Apache-2.0
"""Covariances by solving linear equations with the precision, which is known by its products only."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.errors import ArgumentError, NotConvergedError, NotPositiveDefiniteError
from pyro_dvi.laplace.energy.energy import LocalEnergy
from pyro_dvi.laplace.energy.precision import GGN, PrecisionMatrix
from pyro_dvi.laplace.energy.query import Query
from pyro_dvi.laplace.methods.posterior import LaplacePosterior, Method
from pyro_dvi.linalg import Solution, block_conjugate_gradients, conjugate_gradients


@dataclass(frozen=True)
class ConjugateGradient(Method):
    r"""Solve :math:`P v = J^\top e` for every output at every query, :math:`J P^{-1} J^\top = J V`.

    Nothing is stored but the precision's products; a query of B examples and K outputs solves B K systems together,
    one iteration of which costs two gradients of all data for each. For many queries see ``PosteriorSamples``.

    Status: exact to the tolerance: variances come out too small by less than its square times the condition number.

    Args:
        curvature: ``GGN()``, or ``Hessian()`` at a minimum.
        tolerance: bound on ``|J' e - P v| / |J' e|``; products in float32 reach about 1e-4, which is then the bound.
        max_iterations: by default ``min(10 D, 1000)``.
        preconditioner: a method whose posterior is close to P and solves at once, such as ``TopEigen(k)``. None: all
            right-hand sides share one Krylov space, relative to the prior, which took fewer iterations in our
            measurements than ``Diagonal()`` and ``KroneckerFactored()``.

    Raises:
        NotPositiveDefiniteError: P has a direction of negative curvature: the mode is no minimum.
        NotConvergedError: the tolerance was not reached in ``max_iterations``.

    Source: Hestenes & Stiefel (1952); O'Leary (1980) for blocks.

    Example:
        >>> import pyro_dvi as dvi
        >>> from pyro_dvi.laplace import ConjugateGradient
        >>> net = dvi.to_bayesian_(torch.nn.Linear(1, 1, bias=False))
        >>> guide = dvi.LaplaceGuide(dvi.regressor(net, num_data=3, noise_scale=1.0))
        >>> batches = [(torch.ones(3, 1), torch.zeros(3, 1))]
        >>> _ = guide.polish(batches, progress=False)
        >>> _ = guide.fit(batches, ConjugateGradient())
        >>> guide.predictive(torch.full((1, 1), 2.0)).variance
        tensor([1.])
    """

    curvature: PrecisionMatrix = field(default_factory=GGN)
    tolerance: float = 1e-6
    max_iterations: int | None = None
    preconditioner: Method | None = None

    by_spectrum = True

    def __post_init__(self) -> None:
        check_tolerance("tolerance", self.tolerance)

    def fit(self, local: LocalEnergy, *, seed: int = 0) -> "ConjugateGradientPosterior":
        """Return the posterior."""
        return ConjugateGradientPosterior(PrecisionSolver(self, local, seed))


class PrecisionSolver:
    """Solutions of P v = b.

    Args:
        method: with a curvature, a tolerance, a number of iterations, and a method for its preconditioner; see
            :class:`ConjugateGradient`.
        local: U around the mode.
        seed: of random numbers.
    """

    def __init__(self, method: Any, local: LocalEnergy, seed: int) -> None:
        near = method.preconditioner
        self.method, self.local = method, local
        self._preconditioner = None if near is None else near.fit(local, seed=seed).solve

    def __call__(self, rhs: Tensor) -> Tensor:
        """Return v for the rows b, ``[S, D]``."""
        matrix, tolerance = (
            self.method.curvature,
            max(self.method.tolerance, 1000 * torch.finfo(rhs.dtype).eps),
        )
        try:
            x, found = self._solve(rhs, tolerance)
        except NotPositiveDefiniteError as error:
            raise NotPositiveDefiniteError(
                f"{matrix!r} has curvature {error.curvature:.3g} along a direction: the mode is no "
                "minimum, or the prior does not determine every latent. Run guide.polish(batches), use "
                "curvature=GGN(), or float64.",
                direction=error.direction,
                curvature=error.curvature,
            ) from error
        if not found.converged:
            worst = float(found.residuals.max())
            raise NotConvergedError(
                f"after {found.iterations} iterations a solve with {matrix!r} has the residual {worst:.2g}, "
                f"not {tolerance:.2g}: allow more max_iterations or a larger tolerance, use float64, or another "
                "preconditioner such as TopEigen(k)"
            )
        return x

    def _solve(self, rhs: Tensor, tolerance: float) -> tuple[Tensor, Solution]:
        options: Any = {"tolerance": tolerance, "max_iterations": self.method.max_iterations}

        def product(vectors: Tensor) -> Tensor:
            return self.method.curvature.product(self.local, vectors)

        if self._preconditioner is not None:
            found = conjugate_gradients(product, rhs, preconditioner=self._preconditioner, **options)
            return found.x, found
        half = self.local.prior_scale
        found = block_conjugate_gradients(lambda v: product(v * half) * half, rhs * half, **options)
        return found.x * half, found


class ConjugateGradientPosterior(LaplacePosterior):
    """A Gaussian by solutions with its precision.

    Args:
        solver: gives the solutions.
    """

    def __init__(self, solver: PrecisionSolver) -> None:
        self.mode, self._solver = solver.local.point, solver

    def solve(self, vectors: Tensor) -> Tensor:
        return self._solver(vectors)

    def joint_covariance(self, query: Query) -> Tensor:  # never holds all rows
        found = torch.cat([query.forward(self._solver(rows)).flatten(1) for rows in query.rows()])
        return 0.5 * (found + found.mT)


def check_tolerance(name: str, tolerance: float) -> None:
    """Refuse a tolerance that is no relative residual."""
    if not 0 < tolerance < 1:
        raise ArgumentError(f"{name} must be a relative error between 0 and 1, not {tolerance!r}")
