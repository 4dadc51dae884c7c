# SPDX-License-Identifier: Apache-2.0
"""A pair of fits for each output of each input: exact."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dvi.laplace.energy.query import Query
from pyro_dvi.laplace.methods.hessian_free.mode import Mode
from pyro_dvi.laplace.methods.hessian_free.tilted_energy import OutputTilt
from pyro_dvi.laplace.methods.hessian_free.two_fits import Fits, TwoFits

__all__ = ["Pointwise"]


@dataclass(frozen=True)
class Pointwise(Mode):
    r"""Tilt by every output at every query input in turn.

    .. math:: \frac{f_j(x; u_\lambda) - f_j(x; u_{-\lambda})}{2\lambda}
        = \nabla f_j^\top P^{-1} \nabla f_k + O(\text{step}^2), \qquad u_\lambda = \arg\min_u U(u) - \lambda f_k(x; u)

    Reading all outputs of a tilted fit gives a row of the K x K covariance.

    Status: converges to the exact covariance of the linearised model; B K pairs of fits for B inputs and K outputs.

    Source: McInerney & Kallus (2024), the method proper.
    """

    def fits(self, two_fits: TwoFits, query: Query) -> Iterator[Fits | None]:
        """Solve lazily, some at a time."""
        return two_fits.of(OutputTilt(query, weights) for weights in _unit_weights(query))

    def responses(self, fits: Iterable[Fits | None], query: Query) -> Tensor:
        """Return the covariances of single examples."""
        size = query.size
        found = [row[index // size] for index, row in enumerate(self._rows(fits, query))]
        blocks = torch.stack(found).reshape(query.num_rows, size, size)
        return 0.5 * (blocks + blocks.mT)

    def joint(self, fits: Iterable[Fits | None], query: Query) -> Tensor:
        """Return the covariance of all outputs of all examples, ``[B K, B K]``."""
        whole = torch.stack([row.reshape(-1) for row in self._rows(fits, query)])
        return 0.5 * (whole + whole.mT)

    def _rows(self, fits: Iterable[Fits | None], query: Query) -> Iterator[Tensor]:
        """Covariances ``[B, K]`` of all outputs with each one."""
        for pair in fits:
            yield torch.zeros_like(query.mean) if pair is None else pair.slope(query.at)


def _unit_weights(query: Query) -> Iterator[Tensor]:
    for index in range(query.mean.numel()):
        weights = torch.zeros_like(query.mean)
        weights.view(-1)[index] = 1
        yield weights
