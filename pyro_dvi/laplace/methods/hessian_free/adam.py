# SPDX-License-Identifier: Apache-2.0
"""Adam from the mode, for comparison."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dvi.laplace.methods.hessian_free.solver import FineTuning
from pyro_dvi.laplace.methods.hessian_free.tilted_energy import TiltedEnergy

__all__ = ["Adam"]


@dataclass(frozen=True)
class Adam(FineTuning):
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

    def fine_tuned(self, problem: TiltedEnergy) -> Tensor:
        """Return where the steps end."""
        u = problem.local.point.clone().requires_grad_()
        optimizer = torch.optim.Adam([u], lr=self.learning_rate)
        for _ in range(self.steps):
            _, u.grad = problem.value_and_gradient(u.detach())
            optimizer.step()
        return u.detach()
