# SPDX-License-Identifier: Apache-2.0
"""From a tilt to two fits on either side of the mode, and what a function of the latents does between them."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import torch
from torch import Tensor

from pyro_dvi.errors import ArgumentError, NotConvergedError
from pyro_dvi.laplace.energy.energy import LocalEnergy
from pyro_dvi.laplace.methods.hessian_free.solvers import Solver, Tilt, TiltedEnergy, solve_at_mode

__all__ = ["Fits", "TwoFits", "check_step"]

_SMALLER_STEPS = 3  # tries with a quarter of the step before


@dataclass(frozen=True)
class Fits:
    r"""Minima of tilted energies, and how far apart they are.

    Attributes:
        above: minimum of :math:`U - \lambda r`, [D].
        below: minimum of :math:`U + \lambda r`, or of U, [D].
        apart: the difference between the strengths: :math:`2\lambda` or :math:`\lambda`.
    """

    above: Tensor
    below: Tensor
    apart: float

    def slope(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        r"""Return the derivative by :math:`\lambda` of a function of the minimum, as a difference quotient."""
        return (function(self.above) - function(self.below)) / self.apart


@dataclass(frozen=True)
class TwoFits:
    r"""Solve tilted problems a step away from the mode.

    The strength is the step in posterior standard deviations of r, :math:`\lambda = \text{step}/\hat\sigma`, which
    moves r by :math:`\text{step}\cdot\hat\sigma` and the minimum by ``step`` standard deviations, whatever the units.
    Where the solver does not find a minimum, a quarter of the step is tried, up to three times.

    Args:
        local: U around the mode.
        step: in posterior standard deviations.
        central: fit on both sides.
        solver: finds the minima.
        at_once: tilts that are solved together; each holds several vectors [D].

    Raises:
        ArgumentError: the step is out of range.
    """

    local: LocalEnergy
    step: float
    central: bool
    solver: Solver
    at_once: int = 64

    def __post_init__(self) -> None:
        check_step(self.step)

    def of(self, tilts: Iterable[Tilt]) -> Iterator[Fits | None]:
        """Give the fits of each tilt in order; None where r does not depend on the latents.

        Raises:
            NotPositiveDefiniteError: the Hessian is not positive definite: the mode is no minimum.
            NotConvergedError: a minimum was not found.
        """
        remaining = iter(tilts)
        while chunk := list(islice(remaining, self.at_once)):
            yield from self._solve(chunk)

    def _solve(self, tilts: list[Tilt]) -> list[Fits | None]:
        mode = self.local.point
        gradients = torch.stack([tilt.value_and_gradient(mode)[1] for tilt in tilts])
        moving = [s for s in range(len(tilts)) if bool(gradients[s].any())]
        found: list[Fits | None] = [None] * len(tilts)
        if not moving:
            return found
        gradients = gradients[moving]
        directions = self.solver.directions(self.local, gradients)
        scales = (gradients * directions).sum(-1).sqrt()
        step, pending = self.step, torch.arange(len(moving))
        for _ in range(_SMALLER_STEPS + 1):
            own = [tilts[moving[i]] for i in pending.tolist()]
            rows = pending.to(scales.device)
            strengths = (step / scales[rows]).tolist()
            above, done = self._minima(own, strengths, directions[rows], step)
            below = self._minimum.expand_as(above)
            if self.central:
                below, too = self._minima(own, [-x for x in strengths], directions[rows], step)
                done = done & too
            for i in done.nonzero()[:, 0].tolist():
                apart = strengths[i] * (2 if self.central else 1)
                found[moving[int(pending[i])]] = Fits(above[i], below[i], apart)
            pending, step = pending[~done], step / 4
            if not len(pending):
                return found
        raise NotConvergedError(
            f"{len(pending)} tilted minima were not found, with steps of {self.step:g} to {4 * step:g} posterior "
            "standard deviations: the mode may be no minimum (guide.polish), or the Hessian changes too fast around "
            "it. Take a smaller step; where rounding in float32 is the reason, a larger one or float64"
        )

    def _minima(
        self, tilts: list[Tilt], strengths: list[float], directions: Tensor, step: float
    ) -> tuple[Tensor, Tensor]:
        problems = [TiltedEnergy(self.local, t, s) for t, s in zip(tilts, strengths, strict=True)]
        return self.solver.minimise(problems, directions, step)

    @cached_property
    def _minimum(self) -> Tensor:
        """The minimum of U; what training left to do would count as variance, divided by a small step."""
        return self.local.point - solve_at_mode(self.local, self.local.gradient.unsqueeze(0), 1e-3)[0]


def check_step(step: float) -> None:
    """Refuse a step that is no small distance from the mode.

    Raises:
        ArgumentError: it is out of range.
    """
    if not 0 < step <= 1:
        raise ArgumentError(
            f"step is a distance from the mode in posterior standard deviations, between 0 and 1; got {step}. "
            "The default 0.01 suits float32 and float64."
        )
