# SPDX-License-Identifier: Apache-2.0
"""The value of a constrained site, which an auxiliary site in unconstrained space has drawn."""

from typing import Any

import pyro.distributions as dist
from pyro.distributions.distribution import Distribution
from torch import Tensor
from torch.distributions import register_kl

__all__ = ["TransformedValue"]


class TransformedValue(dist.Delta):
    """A point mass that carries the Jacobian of its transform as its log density.

    Pyro takes the divergence of a point mass from a prior without its log density, so that ``TraceMeanField_ELBO``
    would leave the Jacobian out.
    """


@register_kl(TransformedValue, Distribution)
def _divergence(p: TransformedValue, q: Any) -> Tensor:
    divergence: Tensor = p.log_density - q.log_prob(p.v)
    return divergence
