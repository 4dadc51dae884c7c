# SPDX-License-Identifier: Apache-2.0
r"""The contract of a Laplace method, and of the Gaussian that it makes.

Adding a method: subclass :class:`Method`, whose :meth:`~Method.fit` looks at U around the mode and returns a
:class:`LaplacePosterior`; give that a :meth:`~LaplacePosterior.solve`, which covariances follow from, and what else it
can do at its cost.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyro_dvi.core.arguments import check_choice
from pyro_dvi.errors import UnsupportedError
from pyro_dvi.laplace.energy.energy import LocalEnergy
from pyro_dvi.laplace.energy.precision import NamedInFiles, PrecisionMatrix
from pyro_dvi.laplace.energy.query import Query

_ROWS, _ENTRIES = 512, 1 << 26  # rows of J, and entries of them, that are held together


class Method(ABC):
    """How the Gaussian around the mode is represented.

    Attributes:
        curvature: which matrix is its precision: ``GGN()`` or ``Hessian()``.
        by_spectrum: tuning by the evidence takes the eigenvalues of that matrix, once for all values, instead of
            :meth:`LaplacePosterior.log_determinant`.
        reweights: its posterior may have :meth:`LaplacePosterior.reweighted`.
        needs_minimum: whether the policy for unconverged modes is asked; else the mode may be no minimum.
    """

    curvature: PrecisionMatrix
    by_spectrum: ClassVar[bool] = False
    reweights: ClassVar[bool] = False
    needs_minimum: bool = True

    @abstractmethod
    def fit(self, local: LocalEnergy, *, seed: int) -> "LaplacePosterior":
        """Return the posterior around ``local.point``.

        Args:
            local: U around the mode.
            seed: of random numbers.
        """


def check_method(method: object) -> None:
    """Refuse what is no method, or has no matrix for its precision.

    Raises:
        ArgumentError: a class or string in place of an object.
    """
    check_choice("method", method, Method, "Dense(), Dense(Hessian()) or PosteriorSamples()")
    assert isinstance(method, Method)
    check_choice("curvature", method.curvature, PrecisionMatrix, "GGN() or Hessian()")


class LaplacePosterior(NamedInFiles):
    r"""A Gaussian :math:`\mathcal N(\hat u, P^{-1})` around the mode, as a method of ``laplace`` represents it.

    Attributes:
        mode: :math:`\hat u`, flat, [D].
        independent: its precision is diagonal.
        stored: the arguments of the class, tensors and plain values, that its attributes of the same names hold: what
            a file keeps of it. None: it needs the model and the data to work, and is not saved.
    """

    mode: Tensor
    independent: ClassVar[bool] = False
    stored: ClassVar[tuple[str, ...] | None] = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self.mode)} latents>"

    def state(self) -> dict[str, Any]:
        """Return what a file keeps.

        Raises:
            UnsupportedError: the posterior cannot do without the model and the data.
        """
        if self.stored is None:
            raise UnsupportedError(
                f"{type(self).__name__} solves with the model and the data, which a file does not hold: call guide.fit "
                "again after loading or moving, or use Dense() or PosteriorSamples(n)"
            )
        return {name: getattr(self, name) for name in self.stored}

    def quadratic(self, rows: Tensor) -> Tensor:
        r"""Return :math:`R P^{-1} R^\top` as ``[*lead, n, n]`` for rows of J, ``[*lead, n, D]``; by :meth:`solve`.

        Raises:
            UnsupportedError: the method cannot solve.
        """
        found = rows @ self.solve(rows.flatten(0, -2)).reshape(rows.shape).mT
        return 0.5 * (found + found.mT)

    def covariance(self, query: Query) -> Tensor:
        r"""Return :math:`J_b P^{-1} J_b^\top` for each example, ``[B, K, K]``."""
        size = query.size
        at_once = max(1, min(_ROWS, _ENTRIES // query.layout.size) // size) * size
        blocks = [self.quadratic(rows.unflatten(0, (-1, size))) for rows in query.rows(at_once)]
        return torch.cat(blocks)

    def joint_covariance(self, query: Query) -> Tensor:
        r"""Return :math:`J P^{-1} J^\top` over all examples, ``[B K, B K]``.

        Raises:
            UnsupportedError: the method knows the outputs of single examples only.
        """
        return self.quadratic(torch.cat(list(query.rows())))

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw from the Gaussian: flat vectors ``[count, D]``.

        Raises:
            UnsupportedError: the method has no draws.
        """
        raise UnsupportedError(
            f"{type(self).__name__} has no draws of the latents: use PosteriorSamples(n) or Dense()"
        )

    def solve(self, vectors: Tensor) -> Tensor:
        r"""Return the rows :math:`P^{-1} v` for vectors ``[S, D]``.

        Raises:
            UnsupportedError: the method cannot.
        """
        raise UnsupportedError(
            f"{type(self).__name__} has no solutions of P x = v, so that it has no joint covariance either: use "
            "Dense(), ConjugateGradient(), TopEigen(k), Diagonal() or KroneckerFactored()"
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

    def reweighted(self, likelihood: float, prior: Tensor) -> "LaplacePosterior | None":
        r"""Return the Gaussian of precision :math:`a G + \Pi_c` in place of :math:`G + \Pi`; None: it takes a fit.

        Args:
            likelihood: a, positive.
            prior: the diagonal of :math:`\Pi_c`, positive, [D].

        Raises:
            NotPositiveDefiniteError: that precision is not positive definite.
        """
        return None

    def log_determinant(self) -> Tensor:
        """Return log det P, a scalar.

        Raises:
            UnsupportedError: the method does not know it.
        """
        raise UnsupportedError(
            f"{type(self).__name__} has no log-determinant: use Dense(), or that of the matrix itself, which "
            "guide.log_evidence(batches, determinant=ByLanczos()) and ByEvidence(ByLanczos()) take"
        )
