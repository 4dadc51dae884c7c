# SPDX-License-Identifier: Apache-2.0
"""L-BFGS from the mode, for comparison."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dvi.laplace.methods.hessian_free.solver import FineTuning
from pyro_dvi.laplace.methods.hessian_free.tilted_energy import TiltedEnergy

__all__ = ["LBFGS"]


@dataclass(frozen=True)
class LBFGS(FineTuning):
    """Fine-tune each tilted energy from the mode by limited-memory BFGS with a strong Wolfe line search.

    Status: the minimum of small problems in float64, for several times the work of :class:`NewtonCG`. Nothing checks
    that it was found: gradients alone say little about flat directions, and rounding in float32 ends the search early.

    Args:
        max_iterations: of each fit.
        history: pairs of steps and gradient changes that are kept.

    Source: Liu & Nocedal (1989).
    """

    max_iterations: int = 200
    history: int = 20

    def fine_tuned(self, problem: TiltedEnergy) -> Tensor:
        """Return where the search ends."""
        u = problem.local.point.clone().requires_grad_()
        optimizer = torch.optim.LBFGS(
            [u],
            max_iter=self.max_iterations,
            history_size=self.history,
            tolerance_grad=1e-12,
            tolerance_change=1e-16,
            line_search_fn="strong_wolfe",
        )

        def closure() -> Tensor:
            value, u.grad = problem.value_and_gradient(u.detach())
            return value

        optimizer.step(closure)
        return u.detach()
