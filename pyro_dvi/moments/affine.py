# SPDX-License-Identifier: Apache-2.0
"""Linear layers and matrix products."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.moments.bilinear import bilinear_moments
from pyro_dvi.moments.rules import moment_rule
from pyro_dvi.moments.value import Moments, MultiplicativeMoments, loc_of, variance_of

__all__ = ["linear"]


@moment_rule(F.linear)
def linear(input: Any, weight: Any, bias: Any = None) -> Moments:
    r"""Moments of :math:`xW^\top + b`.

    Status: exact for independent inputs and weights (:mod:`pyro_dvi.moments.bilinear`).

    Args:
        input: ``[*, in]``.
        weight: ``[out, in]``.
        bias: ``[out]``.
    """
    alpha = _alpha_of_inputs(weight)
    if isinstance(weight, Moments) or isinstance(input, Moments):
        y = bilinear_moments(F.linear, input, weight, alpha)
        if bias is None:
            return y
        spread = variance_of(bias)
        return Moments(y.loc + loc_of(bias), y.variance if spread is None else y.variance + spread)
    return Moments(F.linear(input, weight, bias.loc), bias.variance.expand(*input.shape[:-1], -1))


def _alpha_of_inputs(weight: Any) -> Tensor | None:
    """Noise that belongs to input units, as a row; None for any other noise."""
    if isinstance(weight, MultiplicativeMoments) and weight.alpha.dim() == 2 and weight.alpha.shape[0] == 1:
        return weight.alpha[0]
    return None
