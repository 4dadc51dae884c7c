# SPDX-License-Identifier: Apache-2.0
"""Expectations of an uncertain scale that the likelihoods of location and scale share."""

from typing import Any

import torch
from torch import Tensor

from pyro_dvi.expectations.gaussian import check_domain, gaussian_of, mean_at_nodes, nodes_of
from pyro_dvi.moments import GaussianMoments

__all__ = ["log_and_inverse_power", "power_of"]


def log_and_inverse_power(family: type, name: str, scale: Any, power: int) -> tuple[Tensor, Tensor]:
    r"""Return :math:`\mathrm E[\log s]` and :math:`\mathrm E[s^{-p}]`.

    For :math:`s = e^h` with Gaussian h these are :math:`\bar h` and :math:`e^{-p\bar h + p^2 v_h/2}`.

    Status: exact for a certain scale and for ``exp``; Gauss-Hermite with 32 nodes over the Gaussian behind any other
    scale, through its function: 1e-8 relative for softplus at standard deviations up to 1.

    Args:
        family: distribution, for messages.
        name: of the parameter.
        scale: moments, tensor or number.
        power: p.
    """
    if not isinstance(scale, GaussianMoments):
        return scale.log(), scale.pow(-power)
    link = scale.link
    if link is not None and link.name == "exp":
        h = gaussian_of(scale)
        return h.loc, torch.exp(torch.add(-power * h.loc, h.variance, alpha=0.5 * power**2))
    values, weights = nodes_of(scale)
    check_domain(family, name, scale, values)
    return mean_at_nodes(values.log(), weights), mean_at_nodes(values.pow(-power), weights)


def power_of(family: type, name: str, scale: Any, power: int) -> Tensor:
    r"""Return :math:`\mathrm E[s^p]` of a scale or rate; the same status."""
    if not isinstance(scale, GaussianMoments):
        return torch.as_tensor(scale**power)
    if scale.link is not None and scale.link.name == "exp":
        h = gaussian_of(scale)
        return torch.exp(torch.add(power * h.loc, h.variance, alpha=0.5 * power**2))
    if power == 1:
        return scale.loc
    if power == 2:
        return torch.addcmul(scale.variance, scale.loc, scale.loc)
    values, weights = nodes_of(scale)
    return mean_at_nodes(values.pow(power), weights)
