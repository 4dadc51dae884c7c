# SPDX-License-Identifier: Apache-2.0
"""One pair of fits for an evaluation set, tilted by the sum of the predictions."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.laplace.energy.energy import LocalEnergy
from pyro_dvi.laplace.energy.query import Query
from pyro_dvi.laplace.methods.hessian_free.mode import PretrainedMode
from pyro_dvi.laplace.methods.hessian_free.tilted_energy import OutputTilt, Tilt

__all__ = ["Sum"]


@dataclass(frozen=True, eq=False)
class Sum(PretrainedMode):
    r"""Tilt by the sum of an output over an evaluation set, divided by its size M.

    .. math:: r_k(u) = \frac1M \sum_j f_k(x_j; u)

    Status: gives :math:`\frac1M\sum_j \operatorname{Cov}(f_k(x), f_k(x_j))`, the mean of a row of the covariance matrix
    and not the variance; see :class:`~pyro_dvi.laplace.methods.hessian_free.mode.PretrainedMode`.

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
        evaluation = _evaluation_query(self.inputs, local, query)
        return [OutputTilt(evaluation, weights) for weights in _columns(self.weights(evaluation))]

    def weights(self, evaluation: Query) -> Tensor:
        """Return what multiplies the outputs of the evaluation set in the sum."""
        return torch.ones_like(evaluation.mean)


def _evaluation_query(inputs: Any, local: LocalEnergy, query: Query) -> Query:
    """Return the outputs of an evaluation set, or the query itself for None."""
    if inputs is None:
        return query
    energy = local.energy
    given = inputs if isinstance(inputs, tuple) else (inputs,)
    return Query(energy.model, given, energy.locs, energy.layout, site=query.site)


def _columns(weights: Tensor) -> list[Tensor]:
    """Split weights ``[M, K]`` by output, each divided by M."""
    size = weights.shape[1]
    only = torch.eye(size, dtype=weights.dtype, device=weights.device)
    return [weights * only[k] / len(weights) for k in range(size)]
