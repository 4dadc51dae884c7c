# SPDX-License-Identifier: Apache-2.0
r"""The contract of a Laplace method, and of the Gaussian that it makes.

Adding a method: subclass :class:`Method`, whose :meth:`~Method.fit` looks at U around the mode and returns a
:class:`LaplacePosterior`; give that a :meth:`~LaplacePosterior.covariance`, and what else it can do at its cost.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.guides.laplace.energy import LocalEnergy
from pyro_dvi.guides.laplace.precision import PrecisionMatrix
from pyro_dvi.guides.laplace.query import Query

__all__ = ["LaplacePosterior", "Method"]


class Method(ABC):
    """How the Gaussian around the mode is represented.

    Attributes:
        curvature: which matrix is its precision: ``GGN()`` or ``Hessian()``.
    """

    curvature: PrecisionMatrix

    @abstractmethod
    def fit(self, local: LocalEnergy, *, seed: int, progress: bool) -> "LaplacePosterior":
        """Return the posterior around ``local.point``.

        Args:
            local: U around the mode.
            seed: of random numbers.
            progress: show a progress bar.
        """


class LaplacePosterior(ABC):
    r"""A Gaussian :math:`\mathcal N(\hat u, P^{-1})`, as far as its method knows it.

    Attributes:
        mode: :math:`\hat u`, flat, [D].
    """

    mode: Tensor

    @abstractmethod
    def covariance(self, query: Query) -> Tensor:
        r"""Return :math:`J_b P^{-1} J_b^\top` for each example, ``[B, K, K]``."""

    def joint_covariance(self, query: Query) -> Tensor:
        r"""Return :math:`J P^{-1} J^\top` over all examples, ``[B K, B K]``.

        Raises:
            UnsupportedError: the method knows the outputs of single examples only.
        """
        raise UnsupportedError(
            f"{type(self).__name__} has no joint covariance: use Dense() or ConjugateGradient()"
        )

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw from the Gaussian: flat vectors ``[count, D]``.

        Raises:
            UnsupportedError: the method has no draws.
        """
        raise UnsupportedError(
            f"{type(self).__name__} has no draws of the latents: use PosteriorSamples(n) or Dense()"
        )

    def marginal_variance(self) -> Tensor:
        """Return the diagonal of the covariance, [D].

        Raises:
            UnsupportedError: the method does not know it.
        """
        raise UnsupportedError(
            f"{type(self).__name__} does not know the variances of single latents: use Diagonal(), Dense() or "
            "PosteriorSamples(n)"
        )

    def log_determinant(self) -> Tensor:
        """Return log det P, a scalar.

        Raises:
            UnsupportedError: the method does not know it.
        """
        raise UnsupportedError(
            f"{type(self).__name__} has no log-determinant: use Dense() or guide.log_evidence"
        )


def blocks_by_rows(query: Query, quadratic: Callable[[Tensor], Tensor]) -> Tensor:
    """Covariances of single examples from rows of J.

    Args:
        query: the outputs.
        quadratic: maps rows ``[n, K, D]`` of n examples to ``[n, K, K]``.
    """
    size = query.size
    found = [
        quadratic(rows.reshape(-1, size, rows.shape[-1])) for rows in query.rows(size * max(1, 64 // size))
    ]
    return torch.cat(found)
