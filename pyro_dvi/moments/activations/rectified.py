# SPDX-License-Identifier: Apache-2.0
r"""The rectifier, in closed form with its derivatives.

With :math:`\alpha = \mu/\sigma`,

.. math::
    m = \mu\Phi(\alpha) + \sigma\phi(\alpha), \qquad v = \sigma^2\Phi(\alpha) + m(\mu - m),

    \frac{\partial m}{\partial\mu} = \Phi, \quad
    \frac{\partial m}{\partial\sigma^2} = \frac{\phi}{2\sigma}, \quad
    \frac{\partial v}{\partial\mu} = 2m(1 - \Phi), \quad
    \frac{\partial v}{\partial\sigma^2} = \Phi - \frac{m\phi}{\sigma}.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pyro_dvi.moments.floor import floored
from pyro_dvi.moments.rules import Kind, moment_rule
from pyro_dvi.moments.value import Moments

__all__ = ["relu"]

_ROOT_HALF = math.sqrt(0.5)
_DENSITY = 1 / math.sqrt(2 * math.pi)


@moment_rule(F.relu, torch.relu, kind=Kind.ELEMENTWISE)
def relu(input: Moments) -> Moments:
    r"""Moments of ``relu(x)``.

    Status: exact marginals for Gaussian x; correlations between units are dropped.

    Source: Frey & Hinton (1999); Schmitt & Roth (2021), Eq. 11, in a form that stays positive in float32.

    Example:
        >>> relu(Moments(torch.zeros(1), torch.ones(1))).loc
        tensor([0.3989])
    """
    return Moments(*_Rectifier.apply(input.loc, floored(input.variance)))


class _Rectifier(Function):
    @staticmethod
    def forward(ctx: Any, mu: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        inverse = variance.rsqrt()
        z = mu * inverse
        # The distribution function by erfc: 1 + erf loses its digits in the left tail.
        cdf = torch.special.erfc(z * -_ROOT_HALF).mul_(0.5)
        slope = z.square_().mul_(-0.5).exp_().mul_(_DENSITY).mul_(inverse)  # φ(α)/σ
        mean = torch.addcmul(mu * cdf, variance, slope)
        spread = torch.addcmul(variance * cdf, mean, mu - mean).clamp_min_(0)
        ctx.save_for_backward(mean, cdf, slope)
        return mean, spread

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_mean: Tensor, g_spread: Tensor) -> tuple[Tensor, Tensor]:
        mean, cdf, slope = ctx.saved_tensors
        g_mu = torch.addcmul(g_mean * cdf, g_spread * mean, 1 - cdf, value=2)
        g_variance = torch.addcmul(
            g_spread * cdf, slope, torch.addcmul(0.5 * g_mean, g_spread, mean, value=-1)
        )
        return g_mu, g_variance
