# SPDX-License-Identifier: Apache-2.0
r"""Solvers of second fits: fine-tuning with first-order steps on minibatches, as in the paper, and Newton's method.

Tilts r and the energy U are those of :class:`~pyro_dvi.laplace.HessianFree`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from pyro_dvi.core.arguments import check_count, check_positive
from pyro_dvi.errors import NotConvergedError
from pyro_dvi.laplace import HessianFree
from pyro_dvi.laplace.energy.energy import Energy, LocalEnergy
from pyro_dvi.laplace.energy.passes import Arguments
from pyro_dvi.laplace.methods import hessian_free


class Tilt(hessian_free.Tilt):
    """A function r of the flat vector, defined by its gradient; here, a weighted sum of outputs."""

    def gradient(self, point: Tensor, batch: Arguments | None = None) -> Tensor:
        """Return the gradient [D] of r or, if r depends on the data, an estimate from one batch."""
        return super().gradient(point)

    def tilted_gradient(
        self, energy: Energy, point: Tensor, strength: float, batch: Arguments | None = None
    ) -> Tensor:
        r"""Return the gradient of :math:`U - \lambda r`, or an estimate from one batch."""
        return gradient_of(energy, point, batch) - strength * self.gradient(point, batch)


def gradient_of(energy: Energy, point: Tensor, batch: Arguments | None) -> Tensor:
    """Return the gradient of U; or an estimate, for which the likelihood of one batch represents all data."""
    if batch is None:
        return energy.at(point).gradient
    with torch.enable_grad():
        weight = energy.likelihood_weight * num_batches(energy)
        return energy.graph(*energy.run(batch, point), likelihood_weight=weight).gradient()


def num_batches(energy: Energy) -> int:
    """Return the number of batches, which is known after the first pass."""
    return len(energy.passes.sums)


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
    """Choice of the strength of the tilts, and search for the minima."""

    def fits(self, local: LocalEnergy, tilts: Iterable[Tilt], less: str = "opposite") -> Iterator[Fits]:
        """Yield the fits of each tilt in order.

        Args:
            local: U with its derivatives at the mode.
            tilts: functions r.
            less: the fit that is subtracted; see ``SecondFits``.
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
    ``SecondFits(less="mode")``.
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


@dataclass(frozen=True)
class NewtonCG(Solver):
    """The solver of :class:`~pyro_dvi.laplace.HessianFree`, also for one-sided differences.

    Args:
        options: a method with the options of the solver.
    """

    options: HessianFree = field(default_factory=HessianFree)

    def solve(self, local: LocalEnergy, tilts: list[Tilt], less: str) -> list[Fits]:
        """Return the fits of some tilts."""
        if less == "opposite":
            return [Fits(*pair) for pair in self.options.second_fits(local, tilts)]
        newton, mode = self.options, local.point
        gradients = torch.stack([tilt.gradient(mode) for tilt in tilts])
        found = [Fits(mode, mode, 1.0)] * len(tilts)  # the result if r does not depend on the latents
        pending = gradients.any(1).nonzero()[:, 0]
        directions = torch.zeros_like(gradients)
        directions[pending] = newton.solved(local, gradients[pending])
        scales = (gradients * directions).sum(-1).sqrt()
        # Otherwise, the remaining distance to the minimum, divided by a small step, would count as variance.
        left = newton.solved(local, local.gradient.unsqueeze(0))[0] if less == "untilted" else 0.0
        for step in (newton.step / 4**k for k in range(4)):
            strengths, some = step / scales[pending], [tilts[i] for i in pending.tolist()]
            above, done = newton.minima(local, some, strengths, directions[pending], step)
            for i in done.nonzero()[:, 0].tolist():
                found[int(pending[i])] = Fits(above[i], mode - left, float(strengths[i]))
            pending = pending[~done]
            if not len(pending):
                return found
        raise NotConvergedError(f"{len(pending)} tilted minima were not found: use a smaller step")
