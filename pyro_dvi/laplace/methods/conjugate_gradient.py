# SPDX-License-Identifier: Apache-2.0
"""Covariances and samples from linear solves with the precision, with matrix-vector products only."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.core.arguments import check_count
from pyro_dvi.errors import ArgumentError, NotConvergedError, NotPositiveDefiniteError
from pyro_dvi.laplace.energy.energy import LocalEnergy
from pyro_dvi.laplace.energy.precision import GGN, PrecisionMatrix, independent_prior_precision
from pyro_dvi.laplace.energy.query import Query
from pyro_dvi.laplace.methods.method import LaplacePosterior, Method, not_positive
from pyro_dvi.linalg.operator import conjugate_gradients, gaussian_rows


@dataclass(frozen=True)
class ConjugateGradient(Method):
    r"""Solve :math:`P v = J^\top e` for every output in every query, so that :math:`J P^{-1} J^\top = J V`.

    No matrix is stored. A query of B examples and K outputs solves B K systems together; each iteration costs two
    full-data gradients per system. For many queries, see ``PosteriorSamples``.

    Status: exact up to the tolerance. Variances are too small, by a relative error of less than the squared tolerance
    times the condition number.

    Args:
        precision: ``GGN()``, or ``Hessian()`` at a minimum.
        tolerance: bound on ``|J' e - P v| / |J' e|``; in float32, it is at least about 1e-4.
        max_iterations: maximum number of iterations; by default ``min(10 D, 1000)``.

    Raises:
        NotPositiveDefiniteError: P has a direction of negative curvature, so the mode is not a minimum.
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

    precision: PrecisionMatrix = field(default_factory=GGN)
    tolerance: float = 1e-6
    max_iterations: int | None = None

    by_spectrum = True

    def __post_init__(self) -> None:
        check_tolerance(self.tolerance)

    def fit(self, local: LocalEnergy, *, seed: int = 0) -> "ConjugateGradientPosterior":
        """Return the posterior."""
        return ConjugateGradientPosterior(self, local)


def solutions(method: "ConjugateGradient | PosteriorSamples", local: LocalEnergy, rhs: Tensor) -> Tensor:
    """Return v with P v = b for the rows b, ``[S, D]``, in coordinates in which the prior precision is one."""
    matrix, half = method.precision, local.prior_scale
    tolerance = max(method.tolerance, 1000 * torch.finfo(rhs.dtype).eps)
    try:
        solution = conjugate_gradients(
            lambda v: matrix.product(local, v * half) * half,
            rhs * half,
            tolerance=tolerance,
            max_iterations=method.max_iterations,
        )
    except NotPositiveDefiniteError as error:
        found = f"{matrix!r} has curvature {error.curvature:.3g} along a direction"
        raise not_positive(found, direction=error.direction, curvature=error.curvature) from error
    if not solution.converged:
        worst = float(solution.residuals.max())
        reached = f"the residual {worst:.2g}, not {tolerance:.2g}, after {solution.iterations} iterations"
        raise NotConvergedError(f"{reached} with {matrix!r}: increase tolerance, max_iterations or dtype")
    return solution.x * half


class ConjugateGradientPosterior(LaplacePosterior):
    """A Gaussian represented by linear solves with its precision.

    Args:
        method: the method, with its precision, tolerance and number of iterations.
        local: U with its derivatives at the mode.
    """

    def __init__(self, method: ConjugateGradient, local: LocalEnergy) -> None:
        self.mode, self._method, self._local = local.point, method, local

    def solve(self, vectors: Tensor) -> Tensor:
        found: Tensor = _Solve.apply(vectors, self)
        return found

    def joint_covariance(self, query: Query) -> Tensor:  # does not store all rows
        found = torch.cat([query.forward(self.solve(rows)).flatten(1) for rows in query.rows()])
        return 0.5 * (found + found.mT)


class _Solve(torch.autograd.Function):
    """Solutions of P x = v as a differentiable function of v; P is symmetric."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, posterior: ConjugateGradientPosterior) -> Tensor:
        ctx.posterior = posterior
        return solutions(posterior._method, posterior._local, vectors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.posterior.solve(gradient), None


def check_tolerance(tolerance: float) -> None:
    """Raise an error unless the tolerance is below 1; with a larger one, zero would solve every system."""
    if not 0 < tolerance < 1:
        raise ArgumentError(f"tolerance must be a relative error between 0 and 1, got {tolerance!r}")


@dataclass(frozen=True)
class PosteriorSamples(Method):
    r"""Represent the Gaussian by samples that are drawn once and used for every prediction.

    With independent standard normal :math:`\xi, \zeta`,

    .. math::
        P v_s &= J^\top \Lambda^{1/2} \xi_s + \Pi^{1/2} \zeta_s, \qquad P = J^\top \Lambda J + \Pi
        \quad\Rightarrow\quad v_s \sim \mathcal N(0, P^{-1}), \\
        J_* P^{-1} J_*^\top &\approx \frac1S \sum_s (J_* v_s)(J_* v_s)^\top .

    The right-hand sides take one pass over all data. The S conjugate-gradient solves run together, and a query costs S
    products, independent of the number of outputs.

    Status: unbiased up to the tolerance of the solves. A variance has a relative standard error of :math:`\sqrt{2/S}`
    (9 % for 256 draws); the relative error of a standard deviation is half as large. All inputs share the same draws,
    so the errors do not average out over inputs: with 64 draws, the AUROC for out-of-distribution digits varied by 0.08
    between seeds. Only the Gauss-Newton matrix is supported: drawing the noise requires a precision that is a sum of
    squares, and a Hessian is not.

    Args:
        num_samples: S, the number of draws. Antithetic pairs would not help, because the estimate is even in the draws.
        tolerance: tolerance of the solves, see :class:`ConjugateGradient`; the default is far below the sampling error.
        max_iterations: maximum number of iterations; by default ``min(10 D, 1000)``.

    Raises:
        UnsupportedError: the prior couples latents.
        NotConvergedError: the tolerance was not reached in ``max_iterations``.

    Source: Papandreou & Yuille (2010), Section 3; Antorán et al. (2023), Section 3, for linearised networks.

    Example:
        >>> import pyro_dvi as dvi
        >>> from pyro_dvi.laplace import PosteriorSamples
        >>> net = dvi.to_bayesian_(torch.nn.Linear(1, 1, bias=False))
        >>> guide = dvi.LaplaceGuide(dvi.regressor(net, num_data=3, noise_scale=1.0))
        >>> batches = [(torch.ones(3, 1), torch.zeros(3, 1))]
        >>> _ = guide.polish(batches, progress=False)
        >>> guide.fit(batches, PosteriorSamples(1000)).marginal_variance().round(
        ...     decimals=1
        ... )  # 0.25 exactly, ± 4 %
        tensor([0.2000])
    """

    num_samples: int = 256
    tolerance: float = 1e-2
    max_iterations: int | None = None

    precision = GGN()  # not a field, because a Hessian has no factor with which to draw
    by_spectrum = True

    def __post_init__(self) -> None:
        check_tolerance(self.tolerance)
        check_count("num_samples", self.num_samples)

    def fit(self, local: LocalEnergy, *, seed: int = 0) -> "SamplesPosterior":
        """Return the posterior."""
        generator = torch.Generator().manual_seed(seed)
        prior = independent_prior_precision(local, "PosteriorSamples()")
        noise = local.ggn_noise(self.num_samples, generator)
        noise += gaussian_rows(self.num_samples, len(prior), prior, generator) * prior.sqrt()
        return SamplesPosterior(local.point, solutions(self, local, noise))


class SamplesPosterior(LaplacePosterior):
    r"""A Gaussian whose covariance is the second moment of draws, :math:`\frac1S\sum_s v_s v_s^\top`.

    Attributes:
        samples: the draws v minus the mode, ``[S, D]``.
    """

    stored = ("mode", "samples")

    def __init__(self, mode: Tensor, samples: Tensor) -> None:
        self.mode, self.samples = mode, samples

    def covariance(self, query: Query) -> Tensor:
        moved = query.forward(self.samples).movedim(0, 1)  # [B, S, K]
        return moved.mT @ moved / len(self.samples)

    def joint_covariance(self, query: Query) -> Tensor:
        moved = query.forward(self.samples).flatten(1)
        return moved.mT @ moved / len(self.samples)

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw from the Gaussian with the covariance of :attr:`samples`."""
        samples = self.samples
        weights = gaussian_rows(count, len(samples), samples, generator)
        return self.mode + weights @ samples / len(samples) ** 0.5

    def marginal_variance(self) -> Tensor:
        return self.samples.square().mean(0)
