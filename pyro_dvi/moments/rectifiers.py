# SPDX-License-Identifier: Apache-2.0
r"""The rectifier and its leaky forms, in closed form with their derivatives.

With :math:`\alpha = \mu/\sigma`,

.. math::
    m = \mu\Phi(\alpha) + \sigma\phi(\alpha), \qquad v = \sigma^2\Phi(\alpha) + m(\mu - m),

    \frac{\partial m}{\partial\mu} = \Phi, \quad
    \frac{\partial m}{\partial\sigma^2} = \frac{\phi}{2\sigma}, \quad
    \frac{\partial v}{\partial\mu} = 2m(1 - \Phi), \quad
    \frac{\partial v}{\partial\sigma^2} = \Phi - \frac{m\phi}{\sigma}.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pyro_dvi.moments.dispatch import Kind
from pyro_dvi.moments.quadrature import ROOT_HALF, constants, through
from pyro_dvi.moments.rules import moment_rule
from pyro_dvi.moments.value import (
    GaussianMoments,
    loc_of,
    raised,
    second_moment_of,
    tiny_variance,
    variance_of,
)

_FAR = 8.0  # of the argument of erfc: 11.3 deviations, a probability of 1e-29
_LOG_DENSITY = -0.5 * math.log(2 * math.pi)  # at zero


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


@dataclass(frozen=True)
class Leaky:
    r"""The function :math:`ax + (1-a)x_+`, from the moments m and v of the rectifier.

    .. math::
        \mathrm E = a\mu + (1-a)\,m, \qquad \mathrm{Var} = a^2\sigma^2 + (1-a)^2\,v + 2a(1-a)\,\sigma^2\Phi(\alpha).

    Attributes:
        negative_slope: a.
    """

    negative_slope: float

    def __call__(self, mu: Tensor, variance: Tensor, slopes: bool) -> list[Tensor]:
        """Return mean and variance, and their slopes."""
        a, b = self.negative_slope, 1 - self.negative_slope
        m, v, p, density = _rectified(mu, variance)
        mean, spread = (a * mu).add_(m, alpha=b), (a * a * variance).add_(v, alpha=b * b)
        spread.addcmul_(variance, p, value=2 * a * b)
        if not slopes:
            return [mean, spread]
        by_mu = torch.addcmul(m, m, p, value=-1).mul_(2 * b * b)
        by_mu.addcmul_(variance, density, value=2 * a * b)
        by_variance = (p * (b * b + 2 * a * b)).addcmul_(m, density, value=-b * b)
        by_variance.addcmul_(mu, density, value=-a * b).add_(a * a)
        return [mean, spread, (b * p).add_(a), density.mul_(0.5 * b), by_mu, by_variance]


def _rectified(mu: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""Return m, v, Φ(α) and φ(α)/σ in few passes, all but four of them in place.

    Activations are larger than any cache, and fresh memory costs more than the arithmetic.
    """
    inverse = variance.clamp_min(tiny_variance(variance.dtype)).rsqrt_()
    # Beyond 11 deviations from the kink nothing changes but for denormal numbers, which are slow.
    z = torch.addcmul(constants(0.0, mu), mu, inverse, value=-ROOT_HALF).clamp_(-_FAR, _FAR)
    p = torch.special.erfc(z).mul_(0.5)  # by erfc: 1 + erf loses its digits in the left tail
    slope = torch.addcmul(constants(_LOG_DENSITY, mu), z, z, value=-1, out=z).exp_().mul_(inverse)
    mean = torch.mul(variance, slope, out=inverse).addcmul_(mu, p).clamp_min_(0)
    return mean, torch.sub(mu, mean).mul_(mean).addcmul_(variance, p).clamp_min_(0), p, slope


class _Rectifier(Function):
    """Saves two tensors besides its mean, which the next function needs as well."""

    @staticmethod
    def forward(ctx: Any, mu: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        # The floor is in the slopes alone, so that there is no mask in the derivative.
        mean, spread, p, slope = _rectified(mu, variance)
        ctx.save_for_backward(mean, p, slope)
        return mean, spread

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_mean: Tensor, g_spread: Tensor) -> tuple[Tensor, Tensor]:
        mean, p, slope = ctx.saved_tensors
        zero = constants(0.0, mean)
        product = torch.addcmul(zero, g_spread, mean, value=2)  # rounded once: it cancels far to the right
        rest = torch.sub(g_mean, product)
        g_mu = product.addcmul_(rest, p)
        return g_mu, torch.addcmul(zero, rest, slope, value=0.5, out=rest).addcmul_(g_spread, p)


@moment_rule(torch.abs, torch.absolute, kind=Kind.ELEMENTWISE)
def absolute(input: GaussianMoments) -> GaussianMoments:
    """Moments of abs(x), the folded Gaussian. Status: exact.

    Example:
        >>> absolute(GaussianMoments(torch.zeros(1), torch.ones(1))).loc
        tensor([0.7979])
    """
    return through(Leaky(-1.0), input)


@moment_rule(F.leaky_relu, kind=Kind.ELEMENTWISE)
def leaky_relu(input: GaussianMoments, negative_slope: float = 0.01) -> GaussianMoments:
    """Moments of x where it is positive, and a multiple of it elsewhere. Status: exact.

    Example:
        >>> leaky_relu(GaussianMoments(torch.zeros(1), torch.ones(1)), 0.1).loc
        tensor([0.3590])
    """
    return through(Leaky(float(negative_slope)), input)


@moment_rule(F.rrelu, torch.rrelu, kind=Kind.ELEMENTWISE)
def rrelu(
    input: GaussianMoments, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, **_: Any
) -> GaussianMoments:
    r"""Moments of a leaky rectifier whose slope is uniform between two bounds in training, and their middle otherwise.

    The random slope a is integrated out: :math:`\mathrm{Var}[a]\,\mathrm E[\min(x, 0)^2]` is added to the variance.

    Status: exact, over x and the slope.
    """
    middle = leaky_relu(input, (lower + upper) / 2)
    if not training:
        return middle
    negative = relu(GaussianMoments(-input.loc, input.variance))
    random = second_moment_of(negative) * ((upper - lower) ** 2 / 12)
    return GaussianMoments(middle.loc, middle.variance + random)


@moment_rule(torch.prelu)
def prelu(input: Any, weight: Any) -> GaussianMoments:
    r"""Moments of :math:`x_+ - a x_-` with a learned slope a, certain or uncertain.

    .. math::
        m = \mathrm E[x_+] - \bar a\,\mathrm E[x_-], \qquad
        v = \mathrm{Var}[x_+] + \bar a^2\,\mathrm{Var}[x_-] + 2\bar a\,\mathrm E[x_+]\mathrm E[x_-]
            + \mathrm{Var}[a]\,\mathrm E[x_-^2].

    Status: exact marginals; that elements share an uncertain slope is dropped as other correlations are.

    Args:
        input: ``[batch, channels, *]``.
        weight: ``[1]`` or ``[channels]``.
    """
    a, spread = loc_of(weight), variance_of(weight)
    if a.numel() > 1 and input.dim() > 1:  # along the channels
        shape = (-1, *(1,) * (input.dim() - 2))
        a, spread = a.reshape(shape), None if spread is None else spread.reshape(shape)
    if not isinstance(input, GaussianMoments):
        negative = input.clamp_max(0)
        return GaussianMoments(torch.where(input > 0, input, a * input), spread * negative.square())
    above, below = relu(input), relu(GaussianMoments(-input.loc, input.variance))
    variance = above.variance + a.square() * below.variance + 2 * a * above.loc * below.loc
    if spread is not None:
        variance = torch.addcmul(variance, spread, second_moment_of(below))
    return GaussianMoments(above.loc - a * below.loc, variance.clamp_min(0))
