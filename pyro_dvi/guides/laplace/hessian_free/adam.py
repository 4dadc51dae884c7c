# SPDX-License-Identifier: Apache-2.0
"""Adam from the mode, for comparison."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dvi.guides.laplace.hessian_free.solver import Solver
from pyro_dvi.guides.laplace.hessian_free.tilted_energy import TiltedEnergy

__all__ = ["Adam"]


@dataclass(frozen=True)
class Adam(Solver):
    """Fine-tune each tilted energy from the mode as networks are trained.

    Status: the flat directions of a network take far more steps than training does, so that the variance is usually
    wrong by more than 10 %, without a sign of it. Of use for comparison with the literature; take :class:`NewtonCG`.

    Args:
        steps: of each fit; one costs a gradient of all data.
        learning_rate: in units of the unconstrained latents; the default suits steps that are as small as ours.

    Source: McInerney & Kallus (2024) for fine-tuning from the mode; Kingma & Ba (2015).
    """

    steps: int = 1000
    learning_rate: float = 1e-4

    def minimise(
        self, problems: Sequence[TiltedEnergy], directions: Tensor, length: float
    ) -> tuple[Tensor, Tensor]:
        """Return where the steps end, and call all of it found; see :meth:`Solver.minimise`."""
        found = torch.stack([self._minimise(problem) for problem in problems])
        return found, torch.ones(len(problems), dtype=torch.bool)

    def _minimise(self, problem: TiltedEnergy) -> Tensor:
        u = problem.local.point.clone().requires_grad_()
        optimizer = torch.optim.Adam([u], lr=self.learning_rate)
        for _ in range(self.steps):
            _, u.grad = problem.value_and_gradient(u.detach())
            optimizer.step()
        return u.detach()
