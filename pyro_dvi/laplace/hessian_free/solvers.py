# SPDX-License-Identifier: Apache-2.0
r"""Second fits: minima of U tilted by a function r of the latents, from Newton's method or continued training.

.. math:: U_\lambda(u) = U(u) - \lambda\, r(u)

To first order, the minimum moves from the mode by :math:`\lambda P^{-1} \nabla r`, so a second fit gives the product of
the Gaussian's covariance with a gradient.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

import torch
from torch import Tensor

from pyro_dvi.core.arguments import check_count, check_positive
from pyro_dvi.errors import ArgumentError, NotConvergedError
from pyro_dvi.laplace.energy.energy import Energy, LocalEnergy
from pyro_dvi.laplace.energy.passes import Arguments
from pyro_dvi.laplace.energy.query import Query
from pyro_dvi.linalg.operator import conjugate_gradients


class Tilt(ABC):
    """A function r of the flat vector, defined by its gradient."""

    @abstractmethod
    def gradient(self, point: Tensor, batch: Arguments | None = None) -> Tensor:
        """Return the gradient [D] of r or, if r depends on the data, an estimate from one batch."""

    def tilted_gradient(
        self, energy: Energy, point: Tensor, strength: float, batch: Arguments | None = None
    ) -> Tensor:
        r"""Return the gradient of :math:`U - \lambda r`, or an estimate from one batch."""
        return gradient_of(energy, point, batch) - strength * self.gradient(point, batch)


def gradient_of(energy: Energy, point: Tensor, batch: Arguments | None) -> Tensor:
    """Return the gradient of U, or an estimate from one batch."""
    return energy.at(point).gradient if batch is None else energy.batch_gradient(batch, point)


class OutputTilt(Tilt):
    r"""A weighted sum of outputs, :math:`r = \sum_{bk} c_{bk} f_k(x_b)`.

    Args:
        query: the outputs f.
        weights: c, ``[B, K]``.
    """

    def __init__(self, query: Query, weights: Tensor) -> None:
        self.query, self.weights = query, weights

    def gradient(self, point: Tensor, batch: Arguments | None = None) -> Tensor:
        """Return the gradient of r."""
        with torch.enable_grad():
            u = point.detach().requires_grad_()
            return torch.autograd.grad((self.weights * self.query.at(u)).sum(), u)[0]


@dataclass(frozen=True)
class Fits:
    r"""The minima of two fits with one tilt, and the difference of their strengths.

    Attributes:
        above: minimum of :math:`U - \lambda r`, [D].
        below: minimum of :math:`U + \lambda r`, or of U, [D].
        apart: the difference between the strengths: :math:`2\lambda` or :math:`\lambda`.
    """

    above: Tensor
    below: Tensor
    apart: float

    def slope(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        r"""Return the derivative of a function of the minimum with respect to :math:`\lambda`, by finite difference."""
        return (function(self.above) - function(self.below)) / self.apart


_AT_ONCE = 64  # maximum number of tilts solved together; each needs several vectors [D]


class Solver(ABC):
    """Choice of the strength of the tilts, and search for the minima.

    Attributes:
        needs_minimum: whether the latents must be at a minimum of U.
    """

    needs_minimum: ClassVar[bool] = True

    def fits(self, local: LocalEnergy, tilts: Iterable[Tilt], less: str = "opposite") -> Iterator[Fits]:
        """Yield the fits of each tilt in order.

        Args:
            local: U with its derivatives at the mode.
            tilts: functions r.
            less: the fit that is subtracted; see :class:`HessianFree`.
        """
        remaining = iter(tilts)
        while chunk := list(islice(remaining, _AT_ONCE)):
            yield from self.solve(local, chunk, less)

    @abstractmethod
    def solve(self, local: LocalEnergy, tilts: list[Tilt], less: str) -> list[Fits]:
        """Return the fits of some tilts; see :meth:`fits`."""


@dataclass(frozen=True)
class FineTuning(Solver):
    r"""Continue training from the mode with a fixed strength, for some epochs of minibatches.

    This uses only gradients of U and r and works with any network. All fits use the same minibatches in the same order
    and differ only in their tilts, so minibatch noise and the effect of unfinished training cancel to first order.

    Args:
        strength: :math:`\lambda`, in inverse units of the output. An output with standard deviation :math:`\sigma`
            moves by :math:`\lambda\sigma` standard deviations. This number should be below 1 but well above rounding
            errors.
        learning_rate: learning rate of the optimizer.
        epochs: passes over the data.
    """

    strength: float
    learning_rate: float
    epochs: int = 100

    needs_minimum: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_positive("strength", self.strength)
        check_positive("learning_rate", self.learning_rate)
        check_count("epochs", self.epochs)

    @abstractmethod
    def optimizer(self, points: list[Tensor]) -> torch.optim.Optimizer:
        """Return a torch optimizer of the flat vectors; it must treat the vectors independently."""

    def solve(self, local: LocalEnergy, tilts: list[Tilt], less: str) -> list[Fits]:
        """Return the fits of some tilts; see :meth:`fits`."""
        strength, count = self.strength, len(tilts)
        opposite, untilted = [(tilt, -strength) for tilt in tilts], [(tilts[0], 0.0)]
        others = {"opposite": opposite, "untilted": untilted, "mode": []}[less]
        ends = self.ends(local, [*((tilt, strength) for tilt in tilts), *others])
        below = (ends[count:] if others else local.point.unsqueeze(0)).expand(count, -1)
        apart = strength * (2 if less == "opposite" else 1)
        return [Fits(a, b, apart) for a, b in zip(ends[:count], below, strict=True)]

    def ends(self, local: LocalEnergy, problems: list[tuple[Tilt, float]]) -> Tensor:
        """Return the points ``[S, D]`` at which training ends, on U minus each tilt times its strength."""
        energy = local.energy
        local.log_likelihood  # noqa: B018 (checks that the batches are all the data)
        points = [local.point.clone().requires_grad_() for _ in problems]
        optimizer = self.optimizer(points)
        for _ in range(self.epochs):
            for batch in energy.passes:
                for u, (tilt, strength) in zip(points, problems, strict=True):
                    u.grad = tilt.tilted_gradient(energy, u.detach(), strength, batch)
                optimizer.step()
            energy.count(len(problems))
        return torch.stack(points).detach()


@dataclass(frozen=True)
class SGD(FineTuning):
    r"""Stochastic gradient descent, optionally with momentum.

    Status: ends before the minimum. After T full-batch steps with learning rate :math:`\eta` and without momentum, the
    variance is

    .. math:: \nabla f^\top P^{-1} \bigl(1 - (1 - \eta P)^T\bigr) \nabla f

    to first order. This variance is too small: a direction with curvature below :math:`1/\eta T` contributes about
    :math:`\eta T` instead of its inverse curvature, and most of a network's variance comes from such directions. The
    result is positive even if P has negative curvature, so no error is raised for a network far from its minimum.

    Args:
        strength: as in :class:`FineTuning`.
        learning_rate: :math:`\eta`. Because U is a sum over the data, choose a learning rate that is N times smaller
            than for a mean loss. It must be smaller than 2 divided by the largest eigenvalue of P.
        epochs: passes over the data.
        momentum: as in torch.

    Source: McInerney & Kallus (2024) for fine-tuning from the mode; they subtract the mode, as does
    ``HessianFree(less="mode")``.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> from pyro_dvi.laplace import HessianFree, LaplaceGuide
        >>> def model(x, y=None):
        ...     slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(x)):
        ...         return pyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)
        >>> x = torch.ones(3)
        >>> guide = LaplaceGuide(model)  # neither trained nor polished
        >>> _ = guide.fit([(x, x)], HessianFree(solver=SGD(1.0, learning_rate=0.1, epochs=5)))
        >>> guide.predictive(x[:1]).variance  # 1 - (1 - 0.1 * 4)^5 times the variance, 1 / 4
        tensor([0.2306])
    """

    momentum: float = 0.0

    def optimizer(self, points: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(points, lr=self.learning_rate, momentum=self.momentum)


@dataclass(frozen=True)
class Adam(FineTuning):
    """Fine-tuning with Adam.

    Status: ends at an unknown distance from the minimum. Variances are therefore mostly too small, as with
    :class:`SGD`, and may be negative after few steps. After 300 steps on a network with 151 weights, standard
    deviations were 15 to 32 % too small in the median. A tenth of them were too small by a factor of more than 1.7 to
    3.5.

    Args:
        strength: as in :class:`FineTuning`.
        learning_rate: learning rate, in units of the unconstrained latents.
        epochs: passes over the data.

    Source: McInerney & Kallus (2024) for fine-tuning from the mode, see :class:`SGD`; Kingma & Ba (2015).
    """

    learning_rate: float = 5e-3

    def optimizer(self, points: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.Adam(points, lr=self.learning_rate)


_SMALLER_STEPS = 3  # attempts, each with a quarter of the previous step
_ROUNDING = 0.03  # corrections, relative to the step, that may be due to rounding


@dataclass(frozen=True)
class NewtonCG(Solver):
    r"""Newton's method with the Hessian at the mode, with conjugate-gradient solves.

    .. math:: u &\leftarrow u - P^{-1}\,\bigl(\nabla U(u) - \lambda \nabla r(u)\bigr), \\
        u_0 &= \hat u + \lambda P^{-1} \nabla r(\hat u), \qquad
        \lambda = \text{step} / \sqrt{\nabla r^\top P^{-1} \nabla r}

    The strength is chosen such that r moves by ``step`` posterior standard deviations, in any units. Only
    Hessian-vector products are used. Because the minima are close to the mode, the Hessian at the mode is used for all
    of them. Many tilts therefore share one graph and one run of conjugate gradients, and the first solve is used for
    both signs of the tilt. Corrections shrink by a factor that is proportional to the step.

    A correction d changes a variance by at most the relative amount :math:`|d|_P / \text{step}`, by the Cauchy-Schwarz
    inequality. The search ends when the next correction, extrapolated from the last two, would be below the tolerance.
    In float32, rounding may keep corrections above the tolerance; if they no longer shrink, corrections up to 3 % are
    accepted. Above 3 %, the step is too large for the Hessian at the mode, and the search is repeated with a quarter of
    the step, up to three times.

    Status: finds the minimum up to the tolerance.

    Args:
        step: distance of the second fits from the mode, in posterior standard deviations.
        tolerance: relative error of a variance, limited by rounding.
        solve_tolerance: relative residual of each run of conjugate gradients; later corrections compensate for it.
        max_corrections: maximum number of Newton steps after the first.

    Raises:
        ArgumentError: an option is out of range.
        NotPositiveDefiniteError: in a query, the Hessian is not positive definite, so the mode is not a minimum.
        NotConvergedError: in a query, a tilted minimum was not found.

    Source: Kelley (1995), Section 5.4.1, for the chord method; Nocedal & Wright (2006), Alg. 7.1, for Newton-CG.
    """

    step: float = 0.01
    tolerance: float = 2e-3
    solve_tolerance: float = 1e-3
    max_corrections: int = 10

    def __post_init__(self) -> None:
        if not 0 < self.step <= 1:
            raise ArgumentError(f"step must be between 0 and 1 standard deviations, got {self.step}")
        for name in ("tolerance", "solve_tolerance"):
            check_positive(name, getattr(self, name))
        check_count("max_corrections", self.max_corrections)

    def solve(self, local: LocalEnergy, tilts: list[Tilt], less: str) -> list[Fits]:
        """Return the fits of some tilts, with smaller steps if the first is too large."""
        mode = local.point
        found = [Fits(mode, mode, 1.0)] * len(tilts)  # the result if r does not depend on the latents
        gradients = torch.stack([tilt.gradient(mode) for tilt in tilts])
        pending = gradients.any(1).nonzero()[:, 0]
        if not len(pending):
            return found
        directions = torch.zeros_like(gradients)
        directions[pending] = self._inverse(local, gradients[pending])
        scales = (gradients * directions).sum(-1).sqrt()
        # Otherwise, the remaining distance to the minimum, divided by a small step, would count as variance.
        left = self._inverse(local, local.gradient.unsqueeze(0))[0] if less == "untilted" else 0.0
        step = self.step
        for _ in range(_SMALLER_STEPS + 1):
            strengths = step / scales[pending]
            some = [tilts[i] for i in pending.tolist()]
            above, done = self._minima(local, some, strengths, directions[pending], step)
            below = (mode - left).expand_as(above)
            if less == "opposite":
                below, too = self._minima(local, some, -strengths, directions[pending], step)
                done = done & too
            for i in done.nonzero()[:, 0].tolist():
                apart = float(strengths[i]) * (2 if less == "opposite" else 1)
                found[int(pending[i])] = Fits(above[i], below[i], apart)
            pending, step = pending[~done], step / 4
            if not len(pending):
                return found
        tried = f"with steps of {self.step:g} to {4 * step:g} posterior standard deviations"
        raise NotConvergedError(
            f"{len(pending)} tilted minima were not found {tried}: run guide.polish(batches), or use a smaller step or "
            "float64"
        )

    def _minima(
        self, local: LocalEnergy, tilts: list[Tilt], strengths: Tensor, directions: Tensor, step: float
    ) -> tuple[Tensor, Tensor]:
        """Return the minima ``[S, D]``, and a mask of those that were found because their corrections shrank."""
        points = local.point + strengths.unsqueeze(-1) * directions
        found = torch.zeros_like(strengths, dtype=torch.bool)
        active = torch.arange(len(tilts), device=points.device)
        before = torch.full_like(strengths, step)
        for _ in range(self.max_corrections):
            downhill = -torch.stack(
                [
                    tilts[s].tilted_gradient(local.energy, points[s], float(strengths[s]))
                    for s in active.tolist()
                ]
            )
            corrections = self._inverse(local, downhill)
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

    def _inverse(self, local: LocalEnergy, rows: Tensor) -> Tensor:
        """Return products of the inverse Hessian of U with the rows, ``[S, D]``, from conjugate gradients."""
        return conjugate_gradients(local.hessian, rows, tolerance=self.solve_tolerance).x
