# SPDX-License-Identifier: Apache-2.0
"""Pyro's distributions that take NaN for a missing value, as distributions of the same family with a mask."""

import math
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_dvi.core.densities import parent_in, untransformed
from pyro_dvi.core.distributions import rewrapped
from pyro_dvi.runs.uncertain import UncertainDistribution

_FAMILIES = (dist.NanMaskedNormal, dist.NanMaskedMultivariateNormal)


def are_given(fn: Any, value: Tensor) -> Tensor | None:
    """Return a mask of the values that are not missing; None if NaN does not stand for a missing value."""
    base = untransformed(fn)
    family = base.family if isinstance(base, UncertainDistribution) else type(base)
    return None if parent_in(_FAMILIES, family) is None else value.isfinite()


def without_missing(fn: Any, value: Tensor) -> tuple[Any, Tensor]:
    """Return a distribution and a value with the same log density, in which missing values are masked.

    An event that is observed in part is extended to a whole event: its missing elements become zeros with independent
    Gaussians of density one, which have no parameters.

    Example:
        >>> value = torch.tensor([1.0, torch.nan])
        >>> fn, value = without_missing(dist.NanMaskedNormal(torch.zeros(2), 1.0), value)
        >>> value, fn.log_prob(value)
        (tensor([1., 0.]), tensor([-1.4189,  0.0000]))
    """
    given = are_given(fn, value)
    if given is None:
        return fn, value

    def replaced(base: Any) -> Any:
        uncertain = isinstance(base, UncertainDistribution)
        centre, own = (base.at_mean, base.parameters) if uncertain else (base, vars(base))
        kind: Any = dist.Normal
        rows, names = given, ["loc", "scale"]
        if base.event_dim:
            both, alone = (
                given.unsqueeze(-1) & given.unsqueeze(-2),
                torch.eye(value.shape[-1], dtype=value.dtype, device=value.device),
            )
            covariance = torch.where(both, centre.covariance_matrix, alone / (2 * math.pi))
            own = {"loc": torch.where(given, own["loc"], 0.0), "covariance_matrix": covariance}
            kind, rows, names = dist.MultivariateNormal, given.any(-1), list(own)
        parts = {name: own[name] for name in names}
        whole = UncertainDistribution(kind, parts, base.estimator) if uncertain else kind(**parts)
        return whole.mask(rows)

    return rewrapped(fn, replaced), torch.where(given, value, 0.0)
