# SPDX-License-Identifier: Apache-2.0
r"""U pulled aside by a function r of the latents, and the contract of what finds its minima.

.. math:: U_\lambda(u) = U(u) - \lambda\, r(u)

To first order its minimum moves from the mode by :math:`\lambda P^{-1} \nabla r`: what the Gaussian's covariance does
to a gradient, read off a second fit.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

import torch
from torch import Tensor

from pyro_dvi.laplace.energy.energy import Energy, LocalEnergy
from pyro_dvi.laplace.energy.passes import Arguments
from pyro_dvi.laplace.energy.query import Query


class Tilt(ABC):
    """A function r of the flat vector."""

    @abstractmethod
    def value_and_gradient(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Return r, a scalar, and its gradient [D]."""

    def batch_gradient(self, batch: Arguments, point: Tensor) -> Tensor:
        """Return the gradient [D] of r as a batch of the data estimates it; most r do not depend on these."""
        return self.value_and_gradient(point)[1]

    def tilted(self, energy: Energy, point: Tensor, strength: float) -> tuple[Tensor, Tensor]:
        r"""Return :math:`U - \lambda r` and its gradient at a point; up to a constant."""
        value, gradient = energy.at(point).value_and_gradient
        pull, direction = self.value_and_gradient(point)
        return value - strength * pull, gradient - strength * direction

    def tilted_batch_gradient(
        self, energy: Energy, batch: Arguments, point: Tensor, strength: float
    ) -> Tensor:
        r"""Return the gradient of :math:`U - \lambda r` as a batch estimates it."""
        return energy.batch_gradient(batch, point) - strength * self.batch_gradient(batch, point)


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
class Fits:
    r"""Where two fits of one tilt end, and how far apart their strengths are.

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


_AT_ONCE = 64  # tilts that are solved together; each holds several vectors [D]


class Solver(ABC):
    """How strongly U is tilted, and how the minima are found.

    Attributes:
        needs_minimum: whether the latents have to be at a minimum of U before.
    """

    needs_minimum: ClassVar[bool] = True

    def fits(self, local: LocalEnergy, tilts: Iterable[Tilt], central: bool) -> Iterator[Fits]:
        """Give the fits of each tilt in order.

        Args:
            local: U around the mode.
            tilts: functions r.
            central: fit with strengths of both signs; else with one, and without a tilt.
        """
        remaining = iter(tilts)
        while chunk := list(islice(remaining, _AT_ONCE)):
            yield from self.solve(local, chunk, central)

    @abstractmethod
    def solve(self, local: LocalEnergy, tilts: list[Tilt], central: bool) -> list[Fits]:
        """Return the fits of some tilts; see :meth:`fits`."""
