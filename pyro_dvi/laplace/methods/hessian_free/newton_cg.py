# SPDX-License-Identifier: Apache-2.0
"""Newton's method from the mode, whose Hessian serves every tilt."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dvi.errors import ArgumentError
from pyro_dvi.laplace.energy.energy import LocalEnergy
from pyro_dvi.laplace.methods.hessian_free.solver import Solver, solve_at_mode
from pyro_dvi.laplace.methods.hessian_free.tilted_energy import TiltedEnergy

__all__ = ["NewtonCG"]

_ROUNDING = 0.03  # corrections, relative to the step, that may be rounding


@dataclass(frozen=True)
class NewtonCG(Solver):
    r"""Newton's method with the Hessian at the mode, by conjugate gradients.

    .. math:: u \leftarrow u - P^{-1}\,\bigl(\nabla U(u) - \lambda \nabla r(u)\bigr), \qquad
        u_0 = \hat u + \lambda P^{-1} \nabla r(\hat u)

    The Hessian is known by its products only. As the minima lie a small step from the mode, its Hessian serves at all
    of them: many tilts share one graph and one run of conjugate gradients, and the first solve serves both signs.
    Corrections shrink by a factor that is proportional to the step.

    A correction d changes a variance by at most the relative amount :math:`|d|_P / \text{step}`, by the inequality of
    Cauchy and Schwarz. The search ends where the next correction would be below the tolerance, going by the last two.
    In float32 rounding may keep them above it; corrections that no longer shrink are then accepted up to 3 %. Above
    that the step is too large for the Hessian at the mode, and a smaller one is tried.

    Status: the minimum, to the tolerance.

    Args:
        tolerance: relative error that may be left in a variance, where rounding allows.
        solve_tolerance: relative residual of each run of conjugate gradients; later corrections make up for it.
        max_corrections: Newton steps after the first one at most.

    Raises:
        ArgumentError: an option is out of range.

    Source: Kelley (1995), Section 5.4.1, for the chord method; Nocedal & Wright (2006), Alg. 7.1, for Newton-CG.
    """

    tolerance: float = 2e-3
    solve_tolerance: float = 1e-3
    max_corrections: int = 10

    def __post_init__(self) -> None:
        if not (0 < self.tolerance < 1 and 0 < self.solve_tolerance < 1 and self.max_corrections >= 1):
            raise ArgumentError(
                "NewtonCG takes tolerances between 0 and 1 and at least one correction, got "
                f"tolerance={self.tolerance}, solve_tolerance={self.solve_tolerance}, "
                f"max_corrections={self.max_corrections}"
            )

    def directions(self, local: LocalEnergy, gradients: Tensor) -> Tensor:
        """Return the first Newton steps for strength one."""
        return solve_at_mode(local, gradients, self.solve_tolerance)

    def minimise(
        self, problems: Sequence[TiltedEnergy], directions: Tensor, length: float
    ) -> tuple[Tensor, Tensor]:
        """Return the minima, and where the corrections shrink; see :meth:`Solver.minimise`."""
        local = problems[0].local
        strengths = directions.new_tensor([problem.strength for problem in problems])
        points = local.point + strengths.unsqueeze(-1) * directions
        found = torch.zeros(len(problems), dtype=torch.bool)
        active = torch.arange(len(problems))
        before = points.new_full((len(problems),), length)
        for _ in range(self.max_corrections):
            downhill = -torch.stack([problems[s].value_and_gradient(points[s])[1] for s in active.tolist()])
            corrections = solve_at_mode(local, downhill, self.solve_tolerance)
            points[active] += corrections
            sizes = (downhill * corrections).sum(-1).sqrt()  # in posterior standard deviations
            following = sizes * (sizes / before).clamp(max=1)
            stalled = (sizes > 0.5 * before) & (sizes <= _ROUNDING * length)
            done = ((following <= self.tolerance * length) | stalled).cpu()
            hopeless = ((sizes > before) & ~stalled).cpu() & ~done
            found[active[done]] = True
            left = ~(done | hopeless)
            if not bool(left.any()):
                break
            active, before = active[left], sizes[left.to(sizes.device)]
        return points, found
