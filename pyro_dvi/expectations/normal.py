# SPDX-License-Identifier: Apache-2.0
"""Normal and log-normal likelihoods."""

import math
from typing import Any

from torch import Tensor
from torch import distributions as td

from pyro_dvi.expectations.rules import expectation_rule
from pyro_dvi.expectations.scales import log_and_inverse_power
from pyro_dvi.moments.value import loc_of, variance_of

__all__ = ["log_normal", "normal"]

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


@expectation_rule(td.Normal)
def normal(value: Tensor, loc: Any, scale: Any) -> Tensor:
    r"""Expected log density of a Normal.

    For a certain scale

    .. math:: -\tfrac12\log 2\pi s^2 - \frac{v_\mu + (y - \bar\mu)^2}{2s^2},

    and for a scale :math:`e^h`, that is a log-variance :math:`c = 2h` with :math:`v_c = 4v_h`,

    .. math:: -\tfrac12\bigl(\log 2\pi + \bar c + e^{-\bar c + v_c/2}(v_\mu + (y - \bar\mu)^2)\bigr).

    Status: exact for Gaussian loc and a scale that is certain or ``exp``; other scales by quadrature
    (:func:`~pyro_dvi.expectations.scales.log_and_inverse_power`). The correlation of loc and scale is dropped.

    Source: Schmitt & Roth (2021), Eq. 15, which prints :math:`e^{-c + v_c}`. That is a slip: the mean of a
    log-normal variable has half the variance in its exponent.

    Example:
        >>> import torch
        >>> from pyro_dvi.moments import GaussianMoments
        >>> normal(torch.tensor(1.0), GaussianMoments(torch.tensor(0.0), torch.tensor(1.0)), torch.tensor(1.0))
        tensor(-1.9189)
    """
    mean_log, precision = log_and_inverse_power(td.Normal, "scale", scale, 2)
    squares = (value - loc_of(loc)).square()
    spread = variance_of(loc)
    if spread is not None:
        squares = squares + spread
    return -0.5 * squares * precision - mean_log - _HALF_LOG_2PI


@expectation_rule(td.LogNormal)
def log_normal(value: Tensor, loc: Any, scale: Any) -> Tensor:
    r"""Expected log density of a LogNormal: the Normal's at :math:`\log y`, less :math:`\log y`.

    Status: that of :func:`normal`.
    """
    logarithm = value.log()
    return normal(logarithm, loc, scale) - logarithm
