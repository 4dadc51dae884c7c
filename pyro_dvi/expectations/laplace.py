# SPDX-License-Identifier: Apache-2.0
"""The Laplace likelihood."""

import math
from typing import Any

import torch
from torch import Tensor
from torch import distributions as td

from pyro_dvi.expectations.rules import expectation_rule
from pyro_dvi.expectations.scales import log_and_inverse_power
from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.floor import floored

__all__ = ["laplace"]

_LOG_2 = math.log(2)


@expectation_rule(td.Laplace)
def laplace(value: Tensor, loc: Any, scale: Any) -> Tensor:
    r"""Expected log density, :math:`-\log 2 - \mathrm E[\log b] - \mathrm E|y - f|\,\mathrm E[1/b]`.

    With :math:`d = y - \bar f`,

    .. math::
        \mathrm E|y - f| = d\,\mathrm{erf}\frac{d}{\sqrt{2v}} + \sqrt{\frac{2v}{\pi}}\,e^{-d^2/2v}.

    Status: exact for Gaussian loc and a scale that is certain or ``exp``; other scales by quadrature
    (:func:`~pyro_dvi.expectations.scales.log_and_inverse_power`). The correlation of loc and scale is dropped. A loc
    that is some other function of a Gaussian is averaged numerically.
    """
    if isinstance(loc, GaussianMoments) and loc.link is not None:
        return NotImplemented
    mean_log, inverse = log_and_inverse_power(td.Laplace, "scale", scale, 1)
    if isinstance(loc, GaussianMoments):
        distance = _mean_distance(value - loc.loc, loc.variance)
    else:
        distance = (value - loc).abs()
    return -distance * inverse - mean_log - _LOG_2


def _mean_distance(d: Tensor, variance: Tensor) -> Tensor:
    sigma = floored(variance).sqrt()
    z = d / sigma
    return d * torch.erf(z * math.sqrt(0.5)) + math.sqrt(2 / math.pi) * sigma * torch.exp(-0.5 * z.square())
