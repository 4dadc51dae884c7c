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

from pyro_dvi.moments.floor import raised, tiny_variance
from pyro_dvi.moments.rules import Kind, moment_rule
from pyro_dvi.moments.value import GaussianMoments

__all__ = ["relu"]

_ROOT_HALF = math.sqrt(0.5)
_FAR = 8.0  # of the argument of erfc: 11.3 deviations, a probability of 1e-29
_LOG_DENSITY = -0.5 * math.log(2 * math.pi)


@moment_rule(F.relu, torch.relu, kind=Kind.ELEMENTWISE)
def relu(input: GaussianMoments) -> GaussianMoments:
    r"""Moments of ``relu(x)``.

    Status: exact marginals for Gaussian x; correlations between units are dropped.

    Source: Frey & Hinton (1999); Schmitt & Roth (2021), Eq. 11, in a form that stays positive in float32.

    Example:
        >>> relu(GaussianMoments(torch.zeros(1), torch.ones(1))).loc
        tensor([0.3989])
    """
    return GaussianMoments(*_Rectifier.apply(input.loc, raised(input.variance)))


class _Rectifier(Function):
    """Few passes over memory, and most of them in place: activations are larger than any cache."""

    @staticmethod
    def forward(ctx: Any, mu: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        variance = variance.clamp_min(tiny_variance(variance.dtype))  # without a mask in the derivative
        zero = variance.new_zeros(())
        inverse = variance.rsqrt()
        # Beyond 11 deviations from the kink nothing changes but for denormal numbers, which are slow.
        z = torch.addcmul(zero, mu, inverse, value=-_ROOT_HALF).clamp_(-_FAR, _FAR)
        # Twice the distribution function by erfc: 1 + erf loses its digits in the left tail.
        twice = torch.special.erfc(z)
        slope = torch.addcmul(zero + _LOG_DENSITY, z, z, value=-1, out=z).exp_().mul_(inverse)  # φ(α)/σ
        mean = torch.mul(variance, slope, out=inverse).addcmul_(mu, twice, value=0.5).clamp_min_(0)
        spread = torch.sub(mu, mean).mul_(mean).addcmul_(variance, twice, value=0.5).clamp_min_(0)
        ctx.save_for_backward(mean, twice, slope)
        return mean, spread

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_mean: Tensor, g_spread: Tensor) -> tuple[Tensor, Tensor]:
        mean, twice, slope = ctx.saved_tensors
        product = g_spread * mean
        rest = torch.sub(g_mean, product, alpha=2)
        g_mu = product.mul_(2).addcmul_(rest, twice, value=0.5)
        g_variance = rest.mul_(slope).addcmul_(g_spread, twice).mul_(0.5)
        return g_mu, g_variance
