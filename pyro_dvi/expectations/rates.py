# SPDX-License-Identifier: Apache-2.0
"""Likelihoods with a rate: Poisson, exponential and gamma."""

from typing import Any

import torch
from torch import Tensor
from torch import distributions as td

from pyro_dvi.expectations.rules import expectation_rule
from pyro_dvi.expectations.scales import log_and_inverse_power
from pyro_dvi.moments import GaussianMoments

__all__ = ["exponential", "gamma", "poisson"]


@expectation_rule(td.Poisson)
def poisson(value: Tensor, rate: Any) -> Tensor:
    r"""Expected log probability of a count, :math:`y\,\mathrm E[\log r] - \mathrm E[r] - \log y!`.

    Status: exact for a rate that is ``exp`` of a Gaussian; Gauss-Hermite with 32 nodes for other functions.

    Example:
        >>> f = GaussianMoments(torch.zeros(1), torch.ones(1))
        >>> from pyro_dvi.moments import Link
        >>> rate = GaussianMoments(f.loc.exp(), f.variance, Link(f, torch.exp, "exp"))  # as from a rule for exp
        >>> poisson(torch.zeros(1), rate)
        tensor([-1.6487])
    """
    logarithm, mean = log_and_inverse_power(td.Poisson, "rate", rate, -1)
    return value * logarithm - mean - torch.lgamma(value + 1)


@expectation_rule(td.Exponential)
def exponential(value: Tensor, rate: Any) -> Tensor:
    r"""Expected log density, :math:`\mathrm E[\log r] - y\,\mathrm E[r]`; the status is that of :func:`poisson`."""
    logarithm, mean = log_and_inverse_power(td.Exponential, "rate", rate, -1)
    return logarithm - value * mean


@expectation_rule(td.Gamma)
def gamma(value: Tensor, concentration: Any, rate: Any) -> Tensor:
    r"""Expected log density, :math:`a\,\mathrm E[\log r] - \log\Gamma(a) + (a - 1)\log y - y\,\mathrm E[r]`.

    Status: that of :func:`poisson`; an uncertain concentration is averaged numerically.
    """
    if isinstance(concentration, GaussianMoments):
        return NotImplemented
    logarithm, mean = log_and_inverse_power(td.Gamma, "rate", rate, -1)
    a = concentration
    return a * logarithm - torch.lgamma(a) + (a - 1) * value.log() - value * mean
