# SPDX-License-Identifier: Apache-2.0
"""Which matrix is the precision of the Gaussian: a choice passed as an object."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from pyro_dvi.guides.laplace.energy import LocalEnergy

__all__ = ["GGN", "Hessian", "PrecisionMatrix"]


class PrecisionMatrix(ABC):
    """A symmetric matrix P at the mode, by its products."""

    @abstractmethod
    def product(self, local: LocalEnergy, vectors: Tensor) -> Tensor:
        """Return P v as ``[S, D]`` for vectors ``[S, D]``."""


@dataclass(frozen=True)
class GGN(PrecisionMatrix):
    r"""Gauss-Newton: :math:`P = \frac1\kappa\sum_i J_i^\top \Lambda_i J_i - \nabla^2\log p(u)`.

    :math:`\Lambda_i` is the expected Fisher information of the parameters of the observed distribution. Positive
    definite for log-concave priors, whether or not training has converged.

    Status: the exact Hessian of the linearised model; differs from :class:`Hessian` by the curvature of the network.
    """

    def product(self, local: LocalEnergy, vectors: Tensor) -> Tensor:
        """Return P v."""
        return local.ggn(vectors)


@dataclass(frozen=True)
class Hessian(PrecisionMatrix):
    r"""The Hessian of minus the log posterior density, :math:`P = \nabla^2 U`.

    Positive definite at a minimum of U only: train, then ``guide.polish(batches)``.

    Status: exact.
    """

    def product(self, local: LocalEnergy, vectors: Tensor) -> Tensor:
        """Return P v."""
        return local.hessian(vectors)
