# SPDX-License-Identifier: Apache-2.0
"""One pair of fits for an evaluation set, tilted by the sum of absolute predictions."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.guides.laplace.energy import LocalEnergy
from pyro_dvi.guides.laplace.hessian_free.evaluation_sum import columns, evaluation_query
from pyro_dvi.guides.laplace.hessian_free.mode import PretrainedMode
from pyro_dvi.guides.laplace.hessian_free.tilted_energy import OutputTilt, Tilt
from pyro_dvi.guides.laplace.hessian_free.two_fits import Fits
from pyro_dvi.guides.laplace.query import Query

__all__ = ["AbsoluteSum"]


@dataclass(frozen=True, eq=False)
class AbsoluteSum(PretrainedMode):
    r"""Tilt by the sum of absolute outputs over an evaluation set, divided by its size M, and read absolute outputs.

    .. math:: r_k(u) = \frac1M \sum_j |f_k(x_j; u)|, \qquad
        \frac{\partial |f_k(x; u_\lambda)|}{\partial\lambda} \to
        \frac{s(x)}M \sum_j s(x_j) \operatorname{Cov}(f_k(x), f_k(x_j)), \quad s = \operatorname{sign} f_k

    Predictions of different signs are often negatively correlated; the signs then keep terms from cancelling.

    Status: a signed row mean of the covariance matrix, not the variance; it can be negative, and depends on where the
    zero of the output lies. The signs are those at the mode, which is the absolute value until an output crosses zero.

    Args:
        inputs: as for :class:`~pyro_dvi.guides.laplace.hessian_free.evaluation_sum.Sum`.

    Source: McInerney & Kallus (2024), the pre-trained variant with absolute values.
    """

    inputs: Any = None

    @property
    def reusable(self) -> bool:  # type: ignore[override]
        """The fits belong to the evaluation set."""
        return self.inputs is not None

    def tilts(self, local: LocalEnergy, query: Query) -> list[Tilt]:
        """Return one tilt for each output."""
        evaluation = evaluation_query(self.inputs, local, query)
        return [OutputTilt(evaluation, weights) for weights in columns(_signs(evaluation))]

    def responses(self, fits: Iterable[Fits | None], query: Query) -> Tensor:
        """Return the signed row means."""
        signs = _signs(query)
        found = super().responses(fits, query)
        return signs.unsqueeze(-1) * found


def _signs(query: Query) -> Tensor:
    return torch.where(query.mean < 0, -1.0, 1.0).to(query.mean)
