# SPDX-License-Identifier: Apache-2.0
"""The contract of a solver of tilted problems."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_dvi.laplace.energy.energy import LocalEnergy
from pyro_dvi.laplace.methods.hessian_free.tilted_energy import TiltedEnergy
from pyro_dvi.linalg import conjugate_gradients

__all__ = ["FineTuning", "Solver", "solve_at_mode"]


class Solver(ABC):
    """How the minimum of a tilted energy is found, from the mode of the untilted one."""

    def directions(self, local: LocalEnergy, gradients: Tensor) -> Tensor:
        r"""Return :math:`P^{-1} \nabla r` for rows ``[S, D]``, as well as the solver has use for.

        It gives the scale :math:`\hat\sigma = \sqrt{\nabla r^\top P^{-1} \nabla r}` that steps are measured in; a rough
        one will do here.

        Raises:
            NotPositiveDefiniteError: P is not positive definite: the mode is no minimum.
        """
        return solve_at_mode(local, gradients, 1e-2)

    @abstractmethod
    def minimise(
        self, problems: Sequence[TiltedEnergy], directions: Tensor, length: float
    ) -> tuple[Tensor, Tensor]:
        """Return the minima as rows ``[S, D]``, and which of them were found, ``[S]``.

        Args:
            problems: S tilted energies around one mode.
            directions: from :meth:`directions`, ``[S, D]``: the minima lie at about ``mode + strength * direction``.
            length: their distance from the mode, in posterior standard deviations along the tilt.
        """


class FineTuning(Solver):
    """One problem after the other by an optimizer of torch, whose result is called a minimum wherever it ends."""

    def minimise(
        self, problems: Sequence[TiltedEnergy], directions: Tensor, length: float
    ) -> tuple[Tensor, Tensor]:
        """Return where the optimizer ends, and call all of it found; see :meth:`Solver.minimise`."""
        found = torch.stack([self.fine_tuned(problem) for problem in problems])
        return found, torch.ones(len(problems), dtype=torch.bool)

    @abstractmethod
    def fine_tuned(self, problem: TiltedEnergy) -> Tensor:
        """Return where the optimizer ends, [D]."""


def solve_at_mode(local: LocalEnergy, rows: Tensor, tolerance: float) -> Tensor:
    """Return the rows times the inverse of the Hessian of U, ``[S, D]``, by conjugate gradients."""
    return conjugate_gradients(local.hessian, rows, tolerance=tolerance).x
