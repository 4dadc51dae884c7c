# SPDX-License-Identifier: Apache-2.0
r"""Exponentials, sine and cosine in closed form, and the units that are exponential on the left: ELU, SELU, CELU.

.. math::
    \mathrm E[\sin x] = e^{-\sigma^2/2}\sin\mu, \qquad
    \mathrm{Var}[\sin x] = \tfrac12(1 - e^{-\sigma^2})\bigl((1 - e^{-\sigma^2}) + 2e^{-\sigma^2}\cos^2\mu\bigr),

and the same with sine and cosine exchanged: sums of what is not negative, so that no digits cancel.

For :math:`x<0` the units are :math:`a(e^{bx} - 1)`, else x. With :math:`x = \mu + \sigma z`,
:math:`c = -\mu/\sigma` and :math:`S_j = \mathrm E[e^{jbx}; x < 0] = e^{jb\mu + (jb\sigma)^2/2}\,\Phi(c - jb\sigma)`,

.. math::
    \mathrm E[e^{jbx} z;\, x<0] = -\phi(c) + jb\sigma S_j, \qquad
    \mathrm E[e^{jbx} z^2;\, x<0] = (1 + (jb\sigma)^2)\,S_j - (c + jb\sigma)\,\phi(c),

where :math:`e^{jb\mu + (jb\sigma)^2/2}\phi(c - jb\sigma) = \phi(c)` was used. For narrow Gaussians the differences of
these integrals lose their digits; there the exponential is a Taylor polynomial in z, with truncated moments as in
:mod:`pyro_dvi.moments.activations.piecewise`.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.moments.activations.elementwise import from_scores, through
from pyro_dvi.moments.activations.piecewise import Cut, truncated
from pyro_dvi.moments.dispatch import Kind
from pyro_dvi.moments.rules import moment_rule
from pyro_dvi.moments.value import GaussianMoments

_ROOT_HALF = math.sqrt(0.5)
_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805
_CROSSOVER = (0.03, 0.3)  # deviations in float64 and float32
_TERMS = 9
Integrals = tuple[list[Tensor], list[Tensor]]


@moment_rule(torch.exp, kind=Kind.ELEMENTWISE)
def exp(input: GaussianMoments) -> GaussianMoments:
    r"""Moments of :math:`e^x`, which is log-normal.

    .. math:: m = e^{\mu+\sigma^2/2}, \qquad v = (e^{\sigma^2} - 1)\,m^2.

    Status: exact for Gaussian x.

    Example:
        >>> exp(GaussianMoments(torch.zeros(1), torch.ones(1)))
        GaussianMoments(loc=tensor([1.6487]), variance=tensor([4.6708]))
    """
    mean = torch.exp(torch.add(input.loc, input.variance, alpha=0.5))
    return GaussianMoments(mean, mean.square() * torch.expm1(input.variance))


@moment_rule(torch.expm1, torch.special.expm1, kind=Kind.ELEMENTWISE)
def expm1(input: GaussianMoments) -> GaussianMoments:
    r"""Moments of :math:`e^x - 1`. Status: exact, as :func:`exp`."""
    exponent = torch.add(input.loc, input.variance, alpha=0.5)
    return GaussianMoments(torch.expm1(exponent), torch.exp(2 * exponent) * torch.expm1(input.variance))


@moment_rule(torch.sin, kind=Kind.ELEMENTWISE)
def sin(input: GaussianMoments) -> GaussianMoments:
    """Moments of the sine.

    Status: exact for Gaussian x.

    Example:
        >>> sin(GaussianMoments(torch.zeros(1), torch.ones(1))).variance
        tensor([0.4323])
    """
    return _wave(torch.sin(input.loc), torch.cos(input.loc), input.variance)


@moment_rule(torch.cos, kind=Kind.ELEMENTWISE)
def cos(input: GaussianMoments) -> GaussianMoments:
    """Moments of the cosine. Status: exact, as :func:`sin`."""
    return _wave(torch.cos(input.loc), torch.sin(input.loc), input.variance)


def _wave(value: Tensor, other: Tensor, variance: Tensor) -> GaussianMoments:
    lost = -torch.expm1(-variance)
    return GaussianMoments(
        value * torch.exp(-0.5 * variance), 0.5 * lost * (lost + 2 * torch.exp(-variance) * other.square())
    )


@moment_rule(F.elu, kind=Kind.ELEMENTWISE)
def elu(input: GaussianMoments, alpha: float = 1.0) -> GaussianMoments:
    r"""Moments of x where it is positive, and :math:`\alpha(e^x - 1)` elsewhere.

    Status: exact for Gaussian x.

    Example:
        >>> elu(GaussianMoments(torch.zeros(1), torch.ones(1))).loc
        tensor([0.1605])
    """
    return through(_ExponentialLinear(float(alpha)), input)


@moment_rule(F.celu, torch.celu, kind=Kind.ELEMENTWISE)
def celu(input: GaussianMoments, alpha: float = 1.0) -> GaussianMoments:
    r"""Moments of x where it is positive, and :math:`\alpha(e^{x/\alpha} - 1)` elsewhere. Status: exact."""
    return through(_ExponentialLinear(float(alpha), 1 / alpha), input)


@moment_rule(F.selu, torch.selu, kind=Kind.ELEMENTWISE)
def selu(input: GaussianMoments) -> GaussianMoments:
    """Moments of the scaled ELU of self-normalising networks. Status: exact."""
    y = through(_ExponentialLinear(_SELU_ALPHA), input)
    return GaussianMoments(_SELU_SCALE * y.loc, _SELU_SCALE**2 * y.variance)


@dataclass(frozen=True)
class _ExponentialLinear:
    """The function ``alpha * expm1(rate * x)`` for negative x, else x."""

    alpha: float
    rate: float = 1.0

    def __call__(self, mu: Tensor, variance: Tensor, slopes: bool) -> list[Tensor]:
        crossover = _CROSSOVER[mu.dtype is not torch.float64] / self.rate
        sigma = variance.sqrt()
        cut = Cut.at(-mu / sigma)
        centre = torch.where(mu > 0, mu, self.alpha * torch.expm1(self.rate * mu.clamp_max(0)))
        near = self._series(mu, sigma.clamp_max(crossover), cut, centre)
        far = self._closed(mu, sigma.clamp_min(crossover), cut, centre)
        wide = sigma > crossover
        first, second = (
            [torch.where(wide, b, a) for a, b in zip(*pair, strict=True)]
            for pair in zip(near, far, strict=True)
        )
        t = truncated(cut, None, 4)
        q = mu - centre
        first = [f + q * t[k] + sigma * t[k + 1] for k, f in enumerate(first)]
        second = [
            s + q * q * t[k] + sigma * (2 * q * t[k + 1] + sigma * t[k + 2]) for k, s in enumerate(second)
        ]
        return from_scores(centre, sigma, variance, first, second, slopes)

    def _closed(self, mu: Tensor, sigma: Tensor, cut: Cut, centre: Tensor) -> Integrals:
        a, b = self.alpha, self.rate
        rows = []
        for j in range(3):
            shift = j * b * sigma
            z = cut.z - shift
            # Φ(z) e^(j b μ + shift²/2) without overflow: the scaled tail on the left, the plain one on the right
            left = (
                torch.special.erfcx(-_ROOT_HALF * z.clamp_max(0))
                * cut.density
                * (0.5 * math.sqrt(2 * math.pi))
            )
            growth = (j * b * mu + 0.5 * shift * shift).clamp_max(0)  # not positive where z is
            right = 0.5 * torch.special.erfc(-_ROOT_HALF * z) * torch.exp(growth)
            s = torch.where(z < 0, left, right)
            rows.append((s, shift * s - cut.density, (1 + shift * shift) * s - (cut.z + shift) * cut.density))
        # d = a e^(b x) - base
        base = torch.where(mu > 0, a + centre, a * torch.exp(b * mu.clamp_max(0)))
        first = [a * rows[1][k] - base * rows[0][k] for k in range(3)]
        second = [a * a * rows[2][k] + base * (base * rows[0][k] - 2 * a * rows[1][k]) for k in range(3)]
        return first, second

    def _series(self, mu: Tensor, sigma: Tensor, cut: Cut, centre: Tensor) -> Integrals:
        t = truncated(None, cut, _TERMS + 2)
        left = mu.clamp_max(20.0 / self.rate)
        height = self.alpha * torch.exp(self.rate * left)
        base = torch.where(mu > 0, self.alpha * torch.expm1(self.rate * left) - centre, torch.zeros_like(mu))
        power = torch.ones_like(mu)
        linear = [torch.zeros_like(mu) for _ in range(3)]  # E[(e^u - 1) z^k]
        square = [torch.zeros_like(mu) for _ in range(3)]  # E[(e^u - 1)² z^k]
        for n in range(1, _TERMS + 1):
            power = power * (self.rate * sigma) / n
            for k in range(3):
                term = power * t[n + k]
                linear[k] = linear[k] + term
                square[k] = torch.add(square[k], term, alpha=2.0**n - 2)
        first = [height * linear[k] + base * t[k] for k in range(3)]
        second = [height * (height * square[k] + 2 * base * linear[k]) + base * base * t[k] for k in range(3)]
        return first, second
