# SPDX-License-Identifier: Apache-2.0
r"""The interfaces of Laplace methods and of the Gaussians that they return.

To add a method, subclass :class:`Method`; its :meth:`~Method.fit` evaluates U around the mode and returns a
:class:`LaplacePosterior`. A posterior needs only :meth:`~LaplacePosterior.solve`, from which covariances follow; other
operations are optional. :class:`RootPosterior` is the base class if a root of the covariance is available.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyro_dvi.core.arguments import check_choice
from pyro_dvi.curvature.example_gradients import ExampleGradients
from pyro_dvi.errors import ArgumentError, NotPositiveDefiniteError, UnsupportedError
from pyro_dvi.laplace.energy.energy import LocalEnergy
from pyro_dvi.laplace.energy.precision import PrecisionMatrix
from pyro_dvi.laplace.energy.query import Query
from pyro_dvi.linalg.operator import gaussian_rows
from pyro_dvi.links.class_links import ClassLink
from pyro_dvi.runs.outputs import Outputs
from pyro_dvi.runs.predictive_of_outputs import needs_variances_only

_ROWS, _ENTRIES = 512, 1 << 26  # maximum numbers of rows of J, and of entries, that are held at a time


class Method(ABC):
    """A representation of the Gaussian around the mode.

    Attributes:
        precision: the matrix P that the method computes or approximates: ``GGN()`` or ``Hessian()``.
        by_spectrum: whether tuning with the evidence computes the eigenvalues of this matrix once for all values,
            instead of calling :meth:`LaplacePosterior.log_determinant` for each value.
        reweights: whether its posterior may implement :meth:`LaplacePosterior.reweighted`.
    """

    precision: PrecisionMatrix
    by_spectrum: ClassVar[bool] = False
    reweights: ClassVar[bool] = False

    @abstractmethod
    def fit(self, local: LocalEnergy, *, seed: int) -> "LaplacePosterior":
        """Return the posterior around ``local.point``.

        Args:
            local: U around the mode.
            seed: seed of random numbers.
        """


def check_method(method: object) -> None:
    """Check that an object is a method, and that it has a precision matrix.

    Raises:
        ArgumentError: it is a class or string instead of a method object, or has no precision.
    """
    check_choice("method", method, Method, "Dense(), Dense(Hessian()) or PosteriorSamples()")
    precision = getattr(method, "precision", None)
    check_choice("precision", precision, PrecisionMatrix, "GGN() or Hessian(), as an attribute of the method")


class LaplacePosterior(ABC):  # noqa: B024 (a method gives what it can)
    r"""A Gaussian :math:`\mathcal N(\hat u, P^{-1})` around the mode, as represented by a method of ``laplace``.

    Attributes:
        mode: :math:`\hat u`, flat, [D].
        independent: whether its precision is diagonal.
        stored: names of the constructor arguments (tensors and plain values, kept as attributes of the same names) that
            files contain. None means that the posterior needs the model and the data, so it cannot be saved.
        kind: the name of the class in files.
        kinds: mapping from these names to the classes.
    """

    mode: Tensor
    independent: ClassVar[bool] = False
    stored: ClassVar[tuple[str, ...] | None] = None
    kind: ClassVar[str]
    kinds: ClassVar[dict[str, type["LaplacePosterior"]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.kind = f"{cls.__module__}.{cls.__qualname__}"
        LaplacePosterior.kinds[cls.kind] = cls

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self.mode)} latents>"

    def state(self) -> dict[str, Any]:
        """Return the constructor arguments, for files.

        Raises:
            UnsupportedError: the posterior needs the model and the data.
        """
        if self.stored is None:
            what = f"{type(self).__name__} needs the model and the data"
            raise UnsupportedError(f"{what}: fit again after loading or moving, or use PosteriorSamples(n)")
        return {name: getattr(self, name) for name in self.stored}

    def quadratic(self, rows: Tensor) -> Tensor:
        r"""Return :math:`R P^{-1} R^\top`, ``[*lead, n, n]``, for rows R of J, ``[*lead, n, D]``, with :meth:`solve`.

        Raises:
            UnsupportedError: the method does not implement ``solve``.
        """
        found = rows @ self.solve(rows.flatten(0, -2)).reshape(rows.shape).mT
        return 0.5 * (found + found.mT)

    def covariance(self, query: Query) -> Tensor:
        r"""Return :math:`J_b P^{-1} J_b^\top` for each example, ``[B, K, K]``."""
        size = query.size
        at_once = max(1, min(_ROWS, _ENTRIES // query.layout.size) // size) * size
        blocks = [self.quadratic(rows.unflatten(0, (-1, size))) for rows in query.rows(at_once)]
        return torch.cat(blocks)

    def variances(self, query: Query) -> Tensor:
        r"""Return the diagonals of :math:`J_b P^{-1} J_b^\top`, ``[B, K]``."""
        return torch.diagonal(self.covariance(query), dim1=-2, dim2=-1)

    def joint_covariance(self, query: Query) -> Tensor:
        r"""Return :math:`J P^{-1} J^\top` over all examples, ``[B K, B K]``.

        Raises:
            UnsupportedError: the method computes covariances of single examples only.
        """
        return self.quadratic(torch.cat(list(query.rows())))

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw from the Gaussian: flat vectors ``[count, D]``.

        Raises:
            UnsupportedError: the method cannot draw samples.
        """
        raise self._lacks("draws of the latents", "PosteriorSamples(n) or Dense()")

    def solve(self, vectors: Tensor) -> Tensor:
        r"""Return :math:`P^{-1} v` for each row v of ``vectors``, ``[S, D]``.

        Raises:
            UnsupportedError: the method cannot solve systems with P.
        """
        raise self._lacks("solutions of P x = v, and no joint covariance", "Dense() or ConjugateGradient()")

    def marginal_variance(self) -> Tensor:
        """Return the diagonal of the covariance, [D].

        Raises:
            UnsupportedError: the method does not compute it.
        """
        raise self._lacks("variances of single latents", "Diagonal(), Dense() or PosteriorSamples(n)")

    def reweighted(self, likelihood: float, prior: Tensor) -> "LaplacePosterior | None":
        r"""Return the Gaussian with precision :math:`a G + \Pi_c` instead of :math:`G + \Pi`; None if a fit is needed.

        Args:
            likelihood: a, positive.
            prior: the diagonal of :math:`\Pi_c`, positive, [D].

        Raises:
            NotPositiveDefiniteError: the new precision is not positive definite.
        """
        return None

    def for_tuning(self) -> "LaplacePosterior":
        """Return the same Gaussian in a form that :meth:`reweighted` converts quickly many times."""
        return self

    def log_determinant(self) -> Tensor:
        """Return log det P, a scalar.

        Raises:
            UnsupportedError: the method does not compute it.
        """
        raise self._lacks(
            "log-determinant", "Dense(), or ByLanczos() for the log-determinant of the exact matrix"
        )

    def _lacks(self, what: str, instead: str) -> UnsupportedError:
        return UnsupportedError(f"{type(self).__name__} has no {what}: use {instead}")


def not_positive(found: str, **options: Any) -> NotPositiveDefiniteError:
    """Return the error for a precision that is not positive definite."""
    remedy = "the mode is not a minimum, or rounding is too coarse. Run guide.polish(batches), or use GGN() with a "
    remedy += "prior of positive curvature; if it is in use, convert model and data to float64"
    return NotPositiveDefiniteError(f"{found}: {remedy}", **options)


class RootPosterior(LaplacePosterior):
    r"""A Gaussian represented by a root C of its covariance, :math:`P^{-1} = C C^\top`.

    ``polish`` uses such a Gaussian as a metric.
    """

    @abstractmethod
    def coloured(self, rows: Tensor) -> Tensor:
        r"""Return :math:`C v` for rows v, ``[*lead, D]``."""

    @abstractmethod
    def whitened(self, rows: Tensor) -> Tensor:
        r"""Return :math:`C^\top v` for rows v, ``[*lead, D]``."""

    def quadratic(self, rows: Tensor) -> Tensor:
        white = self.whitened(rows)
        return white @ white.mT

    def covariance(self, query: Query) -> Tensor:
        if not query.examples.cheap:
            return super().covariance(query)
        return self.covariance_of_examples(query.examples)

    def covariance_of_examples(self, examples: ExampleGradients) -> Tensor:
        r"""Return :math:`J_i P^{-1} J_i^\top` for each example, ``[B, K, K]``, from rows of J if rules are missing."""
        return torch.cat([self.quadratic(examples.rows(part)) for part in examples.chunks()])

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        return self.mode + self.coloured(gaussian_rows(count, len(self.mode), self.mode, generator))

    def solve(self, vectors: Tensor) -> Tensor:
        return self.coloured(self.whitened(vectors))


@dataclass(frozen=True)
class GaussianOutputs:
    r"""Outputs f of B examples, :math:`f \sim \mathcal N(\hat f, J P^{-1} J^\top)`.

    Outputs are real numbers: a mean, logits, the logarithm of a rate or of a noise scale. The prediction is the
    location of the observed distribution; :func:`~pyro_dvi.predict` also uses the other outputs.

    Attributes:
        outputs: the outputs at the mode, and the distribution that they parameterise.
        full_covariance: covariance of the K outputs of each example, ``[B, K, K]``, in squared units of the outputs.
        full_joint_covariance: covariance of the outputs of all examples, ``[B, K, B, K]``; None unless requested.
    """

    outputs: Outputs
    full_covariance: Tensor
    full_joint_covariance: Tensor | None = None

    @classmethod
    @torch.enable_grad()  # Jacobians need gradients even if the caller disabled them
    def of(
        cls, posterior: LaplacePosterior, query: Query, *, joint: bool = False, link: ClassLink | None = None
    ) -> "GaussianOutputs":
        """Return the outputs of a query; with ``joint``, also the covariance between examples.

        If ``link`` needs no covariances between the logits of many classes, these are zero.
        """
        outputs, count, size = query.outputs, query.num_rows, query.size
        if link is not None and needs_variances_only(outputs, link):
            whole = posterior.variances(query).diag_embed()
        else:
            whole = posterior.joint_covariance(query) if joint else posterior.covariance(query)
        if not query.differentiable:
            outputs, whole = outputs.detached(), whole.detach()
        if not joint:
            return cls(outputs, whole)
        whole = whole.reshape(count, size, count, size)
        rows = torch.arange(count, device=whole.device)
        return cls(outputs, whole[rows, :, rows], whole)

    @property
    def mean(self) -> Tensor:
        """Prediction at the mode, ``[B, ...]``."""
        first = self.outputs.parameters[0]
        return self.outputs.values[:, : first.size].reshape(-1, *first.shape)

    @property
    def variance(self) -> Tensor:
        """Variance of the prediction, ``[B, ...]``."""
        first = self.outputs.parameters[0]
        return torch.diagonal(self.covariance, dim1=-2, dim2=-1).reshape(-1, *first.shape)

    @property
    def covariance(self) -> Tensor:
        """Covariance of the prediction of each example, ``[B, k, k]`` for k numbers."""
        size = self.outputs.parameters[0].size
        return self.full_covariance[:, :size, :size]

    @property
    def joint_covariance(self) -> Tensor:
        """Covariance of the predictions of all examples, ``[B k, B k]``, example by example.

        Raises:
            ArgumentError: it was not requested with ``joint=True``.
        """
        if self.full_joint_covariance is None:
            raise ArgumentError(
                "the covariance between examples was not computed: call guide.predictive(x, joint=True)"
            )
        size = self.outputs.parameters[0].size
        whole = self.full_joint_covariance[:, :size, :, :size]
        return whole.reshape(len(whole) * size, -1)
