# SPDX-License-Identifier: Apache-2.0
r"""U pulled aside by a function of the latents.

.. math:: U_\lambda(u) = U(u) - \lambda\, r(u)

To first order its minimum moves from the mode by :math:`\lambda P^{-1} \nabla r`: what the Gaussian's covariance does
to a gradient, read off a second fit.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dvi.laplace.energy.energy import LocalEnergy
from pyro_dvi.laplace.energy.query import Query

__all__ = ["OutputTilt", "Tilt", "TiltedEnergy"]


class Tilt(ABC):
    """A function r of the flat vector."""

    @abstractmethod
    def value_and_gradient(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Return r, a scalar, and its gradient [D]."""

    def tilted(self, local: LocalEnergy, point: Tensor, strength: float) -> tuple[Tensor, Tensor]:
        r"""Return :math:`U - \lambda r` and its gradient at a point; up to a constant."""
        value, gradient = local.energy.at(point).value_and_gradient
        pull, direction = self.value_and_gradient(point)
        return value - strength * pull, gradient - strength * direction


class OutputTilt(Tilt):
    r"""A weighted sum of outputs, :math:`r = \sum_{bk} c_{bk} f_k(x_b)`.

    Args:
        query: the outputs f.
        weights: c, ``[B, K]``.
    """

    def __init__(self, query: Query, weights: Tensor) -> None:
        self.query, self.weights = query, weights

    def value_and_gradient(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Return r and its gradient."""
        with torch.enable_grad():
            u = point.detach().requires_grad_()
            total = (self.weights * self.query.at(u)).sum()
            (gradient,) = torch.autograd.grad(total, u)
        return total.detach(), gradient


@dataclass(frozen=True)
class TiltedEnergy:
    r"""The problem of one fit: minimise :math:`U - \lambda r`.

    Attributes:
        local: U around the mode.
        tilt: r.
        strength: :math:`\lambda`, of either sign.
    """

    local: LocalEnergy
    tilt: Tilt
    strength: float

    def value_and_gradient(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Return value and gradient at a flat vector [D]."""
        return self.tilt.tilted(self.local, point, self.strength)
