# SPDX-License-Identifier: Apache-2.0
"""Which tilted fits there are, and how variances are read off them: for each query, or from an evaluation set."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyro_dvi.laplace.energy.energy import LocalEnergy
from pyro_dvi.laplace.energy.query import Query
from pyro_dvi.laplace.methods.hessian_free.solvers import Fits, OutputTilt, Tilt
from pyro_dvi.linalg.operator import identity_rows


class Mode(ABC):
    """Which functions U is tilted by.

    Attributes:
        reusable: whether the fits serve other queries of the same site.
        if_negative: why a variance may come out negative, and what to do then.
    """

    reusable: bool = False
    if_negative: ClassVar[str] = (
        "the mode is no minimum, or a second fit has missed its own. Run guide.polish(batches), and use "
        "solver=NewtonCG()"
    )

    def check(self, local: LocalEnergy) -> None:  # noqa: B027 (most suit every model)
        """Refuse models that the mode is not made for."""

    @abstractmethod
    def tilts(self, local: LocalEnergy, query: Query) -> Iterable[Tilt]:
        """Return these functions."""

    @abstractmethod
    def responses(self, fits: Iterable[Fits], query: Query) -> Tensor:
        """Return ``[B, K, K]`` of either sign, read off the fits."""


class PretrainedMode(Mode):
    r"""One pair of fits for each output k, tilted by its mean over an evaluation set of M inputs.

    .. math:: r_k(u) = \frac1M \sum_j f_k(x_j; u), \qquad
        \frac{\partial f_k(x; u_\lambda)}{\partial\lambda} \to \frac1M \sum_j \operatorname{Cov}(f_k(x), f_k(x_j))

    One pair of fits serves any number of inputs, but what it gives is the mean of a row of the covariance matrix, not
    its diagonal: right for inputs that are as correlated with the evaluation set as with themselves, too small by the
    mean correlation otherwise, and negative where that is negative.
    """

    if_negative = "means of rows of the covariance matrix have either sign. Use Pointwise() for variances"

    def responses(self, fits: Iterable[Fits], query: Query) -> Tensor:
        """Return the row means."""
        found = torch.stack([pair.slope(query.at) for pair in fits], -1)  # [B, K] by the tilt of each output
        return 0.5 * (found + found.mT)


@dataclass(frozen=True)
class Pointwise(Mode):
    r"""Tilt by every output at every query input in turn.

    .. math:: \frac{f_j(x; u_\lambda) - f_j(x; u_{-\lambda})}{2\lambda}
        = \nabla f_j^\top P^{-1} \nabla f_k + O(\text{step}^2), \qquad u_\lambda = \arg\min_u U(u) - \lambda f_k(x; u)

    Reading all outputs of a tilted fit gives a row of the K x K covariance.

    Status: converges to the exact covariance of the linearised model; B K pairs of fits for B inputs and K outputs.

    Source: McInerney & Kallus (2024), the method proper.
    """

    def tilts(self, local: LocalEnergy, query: Query) -> Iterator[Tilt]:
        """Give one tilt for each output of each input."""
        units = identity_rows(query.mean.flatten(), at_once=1)
        return (OutputTilt(query, weights.reshape(query.mean.shape)) for weights in units)

    def responses(self, fits: Iterable[Fits], query: Query) -> Tensor:
        """Return the covariances of single examples."""
        size = query.size
        found = [pair.slope(query.at)[index // size] for index, pair in enumerate(fits)]
        blocks = torch.stack(found).reshape(query.num_rows, size, size)
        return 0.5 * (blocks + blocks.mT)

    def joint(self, fits: Iterable[Fits], query: Query) -> Tensor:
        """Return the covariance of all outputs of all examples, ``[B K, B K]``."""
        whole = torch.stack([pair.slope(query.at).reshape(-1) for pair in fits])
        return 0.5 * (whole + whole.mT)


@dataclass(frozen=True, eq=False)
class Sum(PretrainedMode):
    r"""Tilt by the sum of an output over an evaluation set, divided by its size M.

    .. math:: r_k(u) = \frac1M \sum_j f_k(x_j; u)

    Status: gives :math:`\frac1M\sum_j \operatorname{Cov}(f_k(x), f_k(x_j))`, the mean of a row of the covariance matrix
    and not the variance; see :class:`~pyro_dvi.laplace.methods.hessian_free.modes.PretrainedMode`.

    Args:
        inputs: arguments of the model for the evaluation set, a tensor or a tuple; None takes the inputs of each query,
            and fits for each.

    Source: McInerney & Kallus (2024), the pre-trained variant. The paper does not divide by M; without that, the
        result grows with the evaluation set.
    """

    inputs: Any = None

    @property
    def reusable(self) -> bool:  # type: ignore[override]
        """The fits belong to the evaluation set."""
        return self.inputs is not None

    def tilts(self, local: LocalEnergy, query: Query) -> list[Tilt]:
        """Return one tilt for each output."""
        energy, evaluation = local.energy, query
        if self.inputs is not None:
            given = self.inputs if isinstance(self.inputs, tuple) else (self.inputs,)
            evaluation = Query(energy.model, given, energy.locs, energy.layout, site=query.site)
        weights = self.weights(evaluation) / evaluation.num_rows
        return [OutputTilt(evaluation, weights * only) for only in torch.eye(query.size).to(weights)]

    def weights(self, evaluation: Query) -> Tensor:
        """Return what multiplies the outputs of the evaluation set in the sum."""
        return torch.ones_like(evaluation.mean)


@dataclass(frozen=True, eq=False)
class AbsoluteSum(Sum):
    r"""Tilt by the sum of absolute outputs over an evaluation set, divided by its size M, and read absolute outputs.

    .. math:: r_k(u) = \frac1M \sum_j |f_k(x_j; u)|, \qquad
        \frac{\partial |f_k(x; u_\lambda)|}{\partial\lambda} \to
        \frac{s(x)}M \sum_j s(x_j) \operatorname{Cov}(f_k(x), f_k(x_j)), \quad s = \operatorname{sign} f_k

    Predictions of different signs are often negatively correlated; the signs then keep terms from cancelling.

    Status: a signed row mean of the covariance matrix, not the variance; it can be negative, and depends on where the
    zero of the output lies. The signs are those at the mode, which is the absolute value until an output crosses zero.

    Args:
        inputs: as for :class:`~pyro_dvi.laplace.methods.hessian_free.modes.Sum`.

    Source: McInerney & Kallus (2024), the pre-trained variant with absolute values.
    """

    def weights(self, evaluation: Query) -> Tensor:
        """Return the signs of the outputs at the mode."""
        return torch.where(evaluation.mean < 0, -1.0, 1.0).to(evaluation.mean)

    def responses(self, fits: Iterable[Fits], query: Query) -> Tensor:
        """Return the signed row means."""
        return self.weights(query).unsqueeze(-1) * super().responses(fits, query)
