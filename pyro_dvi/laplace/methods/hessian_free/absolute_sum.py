# SPDX-License-Identifier: Apache-2.0
"""One pair of fits for an evaluation set, tilted by the sum of absolute predictions."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dvi.laplace.energy.query import Query
from pyro_dvi.laplace.methods.hessian_free.evaluation_sum import Sum
from pyro_dvi.laplace.methods.hessian_free.two_fits import Fits

__all__ = ["AbsoluteSum"]


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
        inputs: as for :class:`~pyro_dvi.laplace.methods.hessian_free.evaluation_sum.Sum`.

    Source: McInerney & Kallus (2024), the pre-trained variant with absolute values.
    """

    def weights(self, evaluation: Query) -> Tensor:
        """Return the signs of the outputs at the mode."""
        return torch.where(evaluation.mean < 0, -1.0, 1.0).to(evaluation.mean)

    def responses(self, fits: Iterable[Fits | None], query: Query) -> Tensor:
        """Return the signed row means."""
        return self.weights(query).unsqueeze(-1) * super().responses(fits, query)
