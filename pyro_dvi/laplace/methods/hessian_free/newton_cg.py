# SPDX-License-Identifier: Apache-2.0
"""Second fits by Newton's method, a step away from a minimum that is known."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dvi.core.arguments import check_count
from pyro_dvi.errors import ArgumentError, NotConvergedError
from pyro_dvi.laplace.energy.energy import LocalEnergy
from pyro_dvi.laplace.methods.conjugate_gradient import check_tolerance
from pyro_dvi.laplace.methods.hessian_free.solvers import Fits, Solver, Tilt
from pyro_dvi.linalg import conjugate_gradients

_SMALLER_STEPS = 3  # tries with a quarter of the step before
_ROUNDING = 0.03  # corrections, relative to the step, that may be rounding


@dataclass(frozen=True)
class NewtonCG(Solver):
    r"""Newton's method with the Hessian at the mode, by conjugate gradients.

    .. math:: u \leftarrow u - P^{-1}\,\bigl(\nabla U(u) - \lambda \nabla r(u)\bigr), \qquad
        u_0 = \hat u + \lambda P^{-1} \nabla r(\hat u), \qquad
        \lambda = \text{step} / \sqrt{\nabla r^\top P^{-1} \nabla r}

    The strength moves r by ``step`` of its posterior standard deviations, whatever its units. The Hessian is known by
    its products only. As the minima lie a small step from the mode, its Hessian serves at all of them: many tilts share
    one graph and one run of conjugate gradients, and the first solve serves both signs. Corrections shrink by a factor
    that is proportional to the step.

    A correction d changes a variance by at most the relative amount :math:`|d|_P / \text{step}`, by the inequality of
    Cauchy and Schwarz. The search ends where the next correction would be below the tolerance, going by the last two.
    In float32 rounding may keep them above it; corrections that no longer shrink are then accepted up to 3 %. Above
    that the step is too large for the Hessian at the mode, and a quarter of it is tried, up to three times.

    Status: the minimum, to the tolerance.

    Args:
        step: distance of the second fits from the mode in posterior standard deviations.
        tolerance: relative error that may be left in a variance, where rounding allows.
        solve_tolerance: relative residual of each run of conjugate gradients; later corrections make up for it.
        max_corrections: Newton steps after the first one at most.

    Raises:
        ArgumentError: an option is out of range.
        NotPositiveDefiniteError: at a query: the Hessian is not positive definite: the mode is no minimum.
        NotConvergedError: at a query: a minimum was not found.

    Source: Kelley (1995), Section 5.4.1, for the chord method; Nocedal & Wright (2006), Alg. 7.1, for Newton-CG.
    """

    step: float = 0.01
    tolerance: float = 2e-3
    solve_tolerance: float = 1e-3
    max_corrections: int = 10

    def __post_init__(self) -> None:
        if not 0 < self.step <= 1:
            raise ArgumentError(
                "step is a distance from the mode in posterior standard deviations, between 0 and 1; got "
                f"{self.step}. The default 0.01 suits float32 and float64."
            )
        check_tolerance("tolerance", self.tolerance)
        check_tolerance("solve_tolerance", self.solve_tolerance)
        check_count("max_corrections", self.max_corrections)

    def solve(self, local: LocalEnergy, tilts: list[Tilt], central: bool) -> list[Fits]:
        """Return the fits of some tilts, with smaller steps where the first is too large."""
        mode = local.point
        found = [Fits(mode, mode, 1.0)] * len(tilts)  # for r that do not depend on the latents
        gradients = torch.stack([tilt.value_and_gradient(mode)[1] for tilt in tilts])
        pending = gradients.any(1).nonzero()[:, 0]
        if not len(pending):
            return found
        directions = torch.zeros_like(gradients)
        directions[pending] = self._inverse(local, gradients[pending])
        scales = (gradients * directions).sum(-1).sqrt()
        # What training left to do would count as variance, divided by a small step.
        minimum = mode if central else mode - self._inverse(local, local.gradient.unsqueeze(0))[0]
        step = self.step
        for _ in range(_SMALLER_STEPS + 1):
            strengths = step / scales[pending]
            some = [tilts[i] for i in pending.tolist()]
            above, done = self._minima(local, some, strengths, directions[pending], step)
            below = minimum.expand_as(above)
            if central:
                below, too = self._minima(local, some, -strengths, directions[pending], step)
                done = done & too
            for i in done.nonzero()[:, 0].tolist():
                apart = float(strengths[i]) * (2 if central else 1)
                found[int(pending[i])] = Fits(above[i], below[i], apart)
            pending, step = pending[~done], step / 4
            if not len(pending):
                return found
        raise NotConvergedError(
            f"{len(pending)} tilted minima were not found, with steps of {self.step:g} to {4 * step:g} posterior "
            "standard deviations: the mode may be no minimum (guide.polish), or the Hessian changes too fast around "
            "it. Take a smaller step; where rounding in float32 is the reason, a larger one or float64"
        )

    def _minima(
        self, local: LocalEnergy, tilts: list[Tilt], strengths: Tensor, directions: Tensor, step: float
    ) -> tuple[Tensor, Tensor]:
        """Return the minima ``[S, D]``, and which of them were found: where the corrections shrink."""
        points = local.point + strengths.unsqueeze(-1) * directions
        found = torch.zeros_like(strengths, dtype=torch.bool)
        active = torch.arange(len(tilts), device=points.device)
        before = torch.full_like(strengths, step)
        for _ in range(self.max_corrections):
            gradients = [
                tilts[s].tilted(local.energy, points[s], float(strengths[s]))[1] for s in active.tolist()
            ]
            downhill = -torch.stack(gradients)
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
        """Return the rows times the inverse of the Hessian of U, ``[S, D]``, by conjugate gradients."""
        return conjugate_gradients(local.hessian, rows, tolerance=self.solve_tolerance).x
