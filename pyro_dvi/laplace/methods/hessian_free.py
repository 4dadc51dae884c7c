# SPDX-License-Identifier: Apache-2.0
r"""Hessian-free Laplace: variances from second fits, in which a multiple of a prediction is added to the energy.

.. math:: U_\lambda(u) = U(u) - \lambda\, r(u)

To first order, the minimum moves from the mode by :math:`\lambda P^{-1} \nabla r`, so a second fit gives the product of
the Gaussian's covariance with a gradient. The function r is called a tilt.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from pyro_dvi.core.arguments import check_count, check_positive
from pyro_dvi.errors import ArgumentError, NotConvergedError
from pyro_dvi.laplace.energy.energy import Energy, LocalEnergy
from pyro_dvi.laplace.energy.precision import Hessian
from pyro_dvi.laplace.energy.query import Query
from pyro_dvi.laplace.methods.method import LaplacePosterior, Method
from pyro_dvi.linalg.operator import conjugate_gradients, identity_rows

_AT_ONCE = 64  # maximum number of tilts solved together; each needs several vectors [D]
_SMALLER_STEPS = 3  # attempts, each with a quarter of the previous step
_ROUNDING = 0.03  # corrections, relative to the step, that may be due to rounding


class Tilt:
    r"""A weighted sum of outputs, :math:`r = \sum_{bk} c_{bk} f_k(x_b)`, as a function of the flat vector.

    Args:
        query: the outputs f.
        weights: c, ``[B, K]``.
    """

    def __init__(self, query: Query, weights: Tensor) -> None:
        self.query, self.weights = query, weights

    @torch.enable_grad()
    def gradient(self, point: Tensor) -> Tensor:
        """Return the gradient [D] of r."""
        u = point.detach().requires_grad_()
        return torch.autograd.grad((self.weights * self.query.at(u)).sum(), u)[0]

    def tilted_gradient(self, energy: Energy, point: Tensor, strength: float) -> Tensor:
        r"""Return the gradient [D] of :math:`U - \lambda r`."""
        return energy.at(point).gradient - strength * self.gradient(point)


Fits = tuple[Tensor, Tensor, float]
r"""The minima [D] of :math:`U - \lambda r` and :math:`U + \lambda r`, and :math:`2\lambda`."""


@dataclass(frozen=True)
class HessianFree(Method):
    r"""Compute variances from second fits: how far a prediction moves when a multiple of it is added to the loss.

    .. math:: u_{\pm\lambda} = \arg\min_u U(u) \mp \lambda f_k(x; u), \qquad
        \frac{f_j(x; u_\lambda) - f_j(x; u_{-\lambda})}{2\lambda} \to \nabla f_j^\top (\nabla^2 U)^{-1} \nabla f_k

    with U as in :class:`~pyro_dvi.LaplaceGuide`: it includes the full prior, and the log-likelihood of all data divided
    by the KL weight. A query of B inputs and K outputs takes B K pairs of fits.

    The fits use Newton's method with the Hessian P at the mode, and conjugate-gradient solves:

    .. math:: u &\leftarrow u - P^{-1}\,\bigl(\nabla U(u) - \lambda \nabla f_k(u)\bigr), \\
        u_0 &= \hat u + \lambda P^{-1} \nabla f_k(\hat u), \qquad
        \lambda = \text{step} / \sqrt{\nabla f_k^\top P^{-1} \nabla f_k}

    The strength :math:`\lambda` is chosen such that the output moves by ``step`` posterior standard deviations, in any
    units. Only Hessian-vector products are used. Because the minima are close to the mode, the Hessian at the mode is
    used for all of them. Many fits therefore share one graph and one run of conjugate gradients, and the first solve is
    used for both signs of the tilt. Corrections shrink by a factor that is proportional to the step.

    A correction d changes a variance by at most the relative amount :math:`|d|_P / \text{step}`, by the Cauchy-Schwarz
    inequality. A fit ends when the next correction, extrapolated from the last two, would be below the tolerance. In
    float32, rounding may keep corrections above the tolerance; if they no longer shrink, corrections up to 3 % are
    accepted. Above 3 %, the step is too large for the Hessian at the mode, and the fit is repeated with a quarter of
    the step, up to three times.

    Status: the covariance of the exact Hessian, up to terms of the order of the squared step and the tolerance.
    ``ConjugateGradient(Hessian())`` gives the same results with one linear solve instead of two fits, at about a ninth
    of the cost in our benchmark.

    Args:
        step: distance of the second fits from the mode, in posterior standard deviations.
        tolerance: relative error of a variance, limited by rounding.
        solve_tolerance: relative residual of each run of conjugate gradients; later corrections compensate for it.
        max_corrections: maximum number of Newton steps after the first.

    Raises:
        ArgumentError: an option is out of range.
        NotPositiveDefiniteError: in a query, the Hessian is not positive definite, so the mode is not a minimum.
        NotConvergedError: in a query, a tilted minimum was not found.

    Source: McInerney & Kallus (2024); Kelley (1995), Section 5.4.1, for the chord method; Nocedal & Wright (2006), Alg.
    7.1, for Newton-CG.

    Example:
        >>> import pyro, pyro.distributions as dist, pyro_dvi
        >>> def model(x, y=None):
        ...     slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(x)):
        ...         return pyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)
        >>> x = torch.ones(3)
        >>> guide = pyro_dvi.LaplaceGuide(
        ...     model,
        ...     init_loc_fn=pyro.infer.autoguide.init_to_value(
        ...         values={"slope": torch.tensor(0.75)}
        ...     ),
        ... )
        >>> guide.initialize(x, x)
        >>> _ = guide.fit([(x, x)], HessianFree())
        >>> guide.predictive(2 * x).variance.round(decimals=3)
        tensor([1., 1., 1.])
    """

    step: float = 0.01
    tolerance: float = 2e-3
    solve_tolerance: float = 1e-3
    max_corrections: int = 10

    precision = Hessian()  # not a field, because second fits of U correspond to this matrix
    by_spectrum = True

    def __post_init__(self) -> None:
        if not 0 < self.step <= 1:
            raise ArgumentError(f"step must be between 0 and 1 standard deviations, got {self.step}")
        for name in ("tolerance", "solve_tolerance"):
            check_positive(name, getattr(self, name))
        check_count("max_corrections", self.max_corrections)

    def fit(self, local: LocalEnergy, *, seed: int = 0) -> "HessianFreePosterior":
        """Return the posterior; the second fits run in each query."""
        return HessianFreePosterior(local, self)

    def second_fits(self, local: LocalEnergy, tilts: Sequence[Tilt]) -> list[Fits]:
        """Return the fits of some tilts, with smaller steps if the first is too large."""
        mode, gradients = local.point, torch.stack([tilt.gradient(local.point) for tilt in tilts])
        found: list[Fits] = [(mode, mode, 1.0)] * len(tilts)  # the result if r does not depend on the latents
        pending = gradients.any(1).nonzero()[:, 0]
        if not len(pending):
            return found
        directions = torch.zeros_like(gradients)
        directions[pending] = self.solved(local, gradients[pending])
        scales, step = (gradients * directions).sum(-1).sqrt(), self.step
        while step >= self.step / 4**_SMALLER_STEPS:
            strengths, some = step / scales[pending], [tilts[i] for i in pending.tolist()]
            above, done = self.minima(local, some, strengths, directions[pending], step)
            below, too = self.minima(local, some, -strengths, directions[pending], step)
            for i in (done & too).nonzero()[:, 0].tolist():
                found[int(pending[i])] = above[i], below[i], 2 * float(strengths[i])
            pending, step = pending[~(done & too)], step / 4
            if not len(pending):
                return found
        tried = f"with steps of {self.step:g} to {4 * step:g} posterior standard deviations"
        raise NotConvergedError(
            f"{len(pending)} tilted minima were not found {tried}: run guide.polish(batches), or use a smaller step"
        )

    def minima(
        self, local: LocalEnergy, tilts: Sequence[Tilt], strengths: Tensor, directions: Tensor, step: float
    ) -> tuple[Tensor, Tensor]:
        """Return the minima ``[S, D]``, and a mask of those that were found because their corrections shrank."""
        points = local.point + strengths.unsqueeze(-1) * directions
        found = torch.zeros_like(strengths, dtype=torch.bool)
        active = torch.arange(len(tilts), device=points.device)
        before = torch.full_like(strengths, step)
        for _ in range(self.max_corrections):
            some = [(tilts[s], points[s], float(strengths[s])) for s in active.tolist()]
            downhill = -torch.stack([tilt.tilted_gradient(local.energy, u, by) for tilt, u, by in some])
            corrections = self.solved(local, downhill)
            points[active] += corrections
            sizes = (downhill * corrections).sum(-1).sqrt()  # in posterior standard deviations
            following = sizes * (sizes / before).clamp(max=1)
            stalled = (sizes > 0.5 * before) & (sizes <= _ROUNDING * step)
            done = (following <= self.tolerance * step) | stalled
            found[active[done]] = True
            left = ~(done | (sizes > before))
            if not bool(left.any()):
                break
            active, before = active[left], sizes[left]
        return points, found

    def solved(self, local: LocalEnergy, rows: Tensor) -> Tensor:
        """Return products of the inverse Hessian of U with the rows, ``[S, D]``, from conjugate gradients."""
        return conjugate_gradients(local.hessian, rows, tolerance=self.solve_tolerance).x


class HessianFreePosterior(LaplacePosterior):
    """A Gaussian represented by second fits.

    Args:
        local: U with its derivatives at the mode.
        method: the method, with its options.
    """

    def __init__(self, local: LocalEnergy, method: HessianFree) -> None:
        self.mode, self.local, self.method = local.point, local, method

    def covariance(self, query: Query) -> Tensor:
        size = query.size
        found = [row[index // size] for index, row in enumerate(self._rows(query))]
        blocks = torch.stack(found).reshape(query.num_rows, size, size)
        return 0.5 * (blocks + blocks.mT)

    def joint_covariance(self, query: Query) -> Tensor:
        whole = torch.stack([row.reshape(-1) for row in self._rows(query)])
        return 0.5 * (whole + whole.mT)

    def _rows(self, query: Query) -> Iterator[Tensor]:
        """Yield the covariances ``[B, K]`` of each output of each example with all outputs."""
        units = identity_rows(query.mean.flatten(), at_once=1)
        tilts = (Tilt(query, unit.reshape(query.mean.shape)) for unit in units)
        while chunk := list(islice(tilts, _AT_ONCE)):
            for above, below, apart in self.method.second_fits(self.local, chunk):
                yield (query.at(above) - query.at(below)) / apart
