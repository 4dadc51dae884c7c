# SPDX-License-Identifier: Apache-2.0
"""Second fits with gradients only, of a fixed strength: from anywhere, as networks are trained."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pyro_dvi.core.arguments import check_choice, check_count, check_positive
from pyro_dvi.laplace.energy.energy import LocalEnergy
from pyro_dvi.laplace.methods.hessian_free.solvers import Fits, Solver, Tilt


@dataclass(frozen=True)
class FixedStrength(Solver):
    r"""Fits with a strength :math:`\lambda` that is given, which takes gradients of U and r only.

    Args:
        strength: :math:`\lambda`, in units of one by those of the output. It moves an output of standard deviation
            :math:`\sigma` by :math:`\lambda\sigma` of these, which should be below one, but above rounding.
    """

    strength: float

    needs_minimum: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_positive("strength", self.strength)

    def solve(self, local: LocalEnergy, tilts: list[Tilt], central: bool) -> list[Fits]:
        """Return the fits of some tilts, with a fit without a tilt for one side only."""
        strength = self.strength
        others = [(tilt, -strength) for tilt in tilts] if central else [(tilts[0], 0.0)]
        ends = self.minima(local, [*((tilt, strength) for tilt in tilts), *others])
        above, below = ends[: len(tilts)], ends[len(tilts) :].expand(len(tilts), -1)
        return [Fits(a, b, strength * (2 if central else 1)) for a, b in zip(above, below, strict=True)]

    @abstractmethod
    def minima(self, local: LocalEnergy, problems: list[tuple[Tilt, float]]) -> Tensor:
        """Return where U, less each tilt times its strength, has been minimised: ``[S, D]``."""


@dataclass(frozen=True)
class AsPrinted(Solver):
    r"""The difference that the paper prints: a tilted fit less the network as it is, which is not trained further.

    .. math:: \frac{f(x; u_\lambda) - f(x; \hat u)}\lambda \;\approx\;
        \nabla f^\top P^{-1} \nabla f + \frac{\nabla f^\top (u_0 - \hat u)}\lambda

    with :math:`u_0` where the solver gets without a tilt. The other solvers subtract a fit that took the same steps,
    and so :math:`f(x; u_0)` in place of :math:`f(x; \hat u)`.

    Status: one fit for each tilt, but what training had left to do counts as variance, of either sign, and the more
    the smaller the strength. Right where the network is at a minimum and the solver finds the tilted one.

    Args:
        solver: of the tilted fits, ``Adam(strength)``, ``SGD(strength, learning_rate)`` or ``LBFGS(strength)``.

    Raises:
        ArgumentError: the solver has no strength, as ``NewtonCG()``, which accounts for what training left by itself.

    Source: McInerney & Kallus (2024).

    Example:
        >>> AsPrinted(Adam(0.1)).solver.strength
        0.1
    """

    solver: FixedStrength

    needs_minimum: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_choice("solver", self.solver, FixedStrength, "Adam(strength), SGD(...) or LBFGS(strength)")

    def solve(self, local: LocalEnergy, tilts: list[Tilt], central: bool) -> list[Fits]:
        """Return the fits of some tilts beside the network, whatever ``central`` is."""
        ends = self.solver.minima(local, [(tilt, self.solver.strength) for tilt in tilts])
        return [Fits(end, local.point, self.solver.strength) for end in ends]


@dataclass(frozen=True)
class FineTuning(FixedStrength):
    """Train on from the mode, for some epochs over the minibatches: a step for each, of all fits.

    All fits take the same minibatches in the same order, and differ by their tilts only, so that the noise of
    minibatches, and what training had left to do, cancel to first order.
    """

    learning_rate: float
    epochs: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("learning_rate", self.learning_rate)
        check_count("epochs", self.epochs)

    @abstractmethod
    def optimizer(self, points: list[Tensor]) -> torch.optim.Optimizer:
        """Return an optimizer of torch, which treats each of the flat vectors by itself."""

    def minima(self, local: LocalEnergy, problems: list[tuple[Tilt, float]]) -> Tensor:
        """Return where training ends."""
        energy = local.energy
        energy.value(local.point)  # whether the batches are all the data
        points = [local.point.clone().requires_grad_() for _ in problems]
        optimizer = self.optimizer(points)
        for _ in range(self.epochs):
            for batch in energy.passes:
                for u, (tilt, strength) in zip(points, problems, strict=True):
                    u.grad = tilt.tilted_batch_gradient(energy, batch, u.detach(), strength)
                optimizer.step()
            energy.count(len(problems))
        return torch.stack(points).detach()


@dataclass(frozen=True)
class SGD(FineTuning):
    r"""Stochastic gradient descent, with momentum if wanted.

    Status: not the minimum but the way to it. After T steps of rate :math:`\eta` without momentum, with all data in
    each, the variance is

    .. math:: \nabla f^\top P^{-1} \bigl(1 - (1 - \eta P)^T\bigr) \nabla f

    to first order. It is too small: a direction of curvature below :math:`1/\eta T` contributes about
    :math:`\eta T` instead of the inverse of its curvature, and most of a network's variance comes from such directions.
    It is positive where P has negative curvature, too, so that no error tells of a network far from its minimum.

    Args:
        strength: as for :class:`FixedStrength`.
        learning_rate: :math:`\eta`, for U, a sum over the data: N times less than for a mean. It has to be below two by
            the largest eigenvalue of P.
        epochs: passes over the data.
        momentum: as in torch.

    Source: McInerney & Kallus (2024) for fine-tuning from the mode; their difference is that of :class:`AsPrinted`.

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
        """Return it."""
        return torch.optim.SGD(points, lr=self.learning_rate, momentum=self.momentum)


@dataclass(frozen=True)
class Adam(FineTuning):
    """Adam, as networks are usually trained.

    Status: not the minimum but the way to it, without a sign of how far: variances are mostly too small, as with
    :class:`SGD`, and may be negative after few steps. After 300 steps of a network of 151 weights standard deviations
    were 15 to 32 % too small in the median, a tenth of them by more than 1.7 to 3.5 times.

    Args:
        strength: as for :class:`FixedStrength`.
        learning_rate: in units of the unconstrained latents.
        epochs: passes over the data.

    Source: McInerney & Kallus (2024) for fine-tuning from the mode, see :class:`SGD`; Kingma & Ba (2015).
    """

    learning_rate: float = 5e-3

    def optimizer(self, points: list[Tensor]) -> torch.optim.Optimizer:
        """Return it."""
        return torch.optim.Adam(points, lr=self.learning_rate)


@dataclass(frozen=True)
class LBFGS(FixedStrength):
    """Limited-memory BFGS with a strong Wolfe line search, on all data: first without a tilt, from there with each.

    Status: the minima of small problems in float64, for several times the work of ``NewtonCG``. Nothing checks that
    they were found, or belong to one another: gradients alone say little about flat directions, and rounding in float32
    ends the search early.

    Args:
        strength: as for :class:`FixedStrength`.
        max_iterations: of each fit.
        history: pairs of steps and gradient changes that are kept.

    Source: Liu & Nocedal (1989).
    """

    max_iterations: int = 200
    history: int = 20

    def minima(self, local: LocalEnergy, problems: list[tuple[Tilt, float]]) -> Tensor:
        """Return where the searches end."""
        start = self._minimum(local, local.point, problems[0][0], 0.0)
        return torch.stack([self._minimum(local, start, *problem) for problem in problems])

    def _minimum(self, local: LocalEnergy, start: Tensor, tilt: Tilt, strength: float) -> Tensor:
        u = start.clone().requires_grad_()
        optimizer = torch.optim.LBFGS(
            [u],
            max_iter=self.max_iterations,
            history_size=self.history,
            tolerance_grad=1e-12,
            tolerance_change=1e-16,
            line_search_fn="strong_wolfe",
        )

        def closure() -> Tensor:
            value, u.grad = tilt.tilted(local.energy, u.detach(), strength)
            return value

        optimizer.step(closure)  # type: ignore[arg-type]
        return u.detach()
