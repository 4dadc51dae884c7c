# SPDX-License-Identifier: Apache-2.0
r"""Smooth activations, exponentials, sine and cosine.

**GELU**, :math:`x\,\Phi(x)`, has a closed form.
Let :math:`x\sim\mathcal N(\mu, v)`, :math:`\tau = 1/(1+v)`, :math:`a = 1/\sqrt{1+2v}`, :math:`h = \mu\sqrt\tau` and
:math:`k = ah`. Then :math:`\mathrm E[\Phi(x)] = \Phi(h)`, and with Owen's function T

.. math::
    D = \mathrm{Var}[\Phi(x)] = 2T(h, 1) - 2T(h, a)
      = \frac{1}{\pi}\int_a^1 \frac{e^{-h^2(1+t^2)/2}}{1+t^2}\,dt, \qquad
    E = \Phi(h) - \Phi(k) = \frac{h}{\sqrt{2\pi}}\int_a^1 e^{-h^2t^2/2}\,dt,

Both integrals contain the same exponential and are computed by Gauss-Legendre quadrature. Both are proportional to v
for small v (the interval has length :math:`1 - a = 2va^2/(1+a)`). With :math:`D = vD'` and :math:`E = vE'`, all
formulas below are accurate however small v is.

Let :math:`\varphi = \phi(h)`. Stein's lemma, :math:`\mathrm E[x\,f(x)] = \mu\,\mathrm E f + v\,\mathrm E f'`, applied
twice, gives the moments of :math:`x\,\Phi(x)`:

.. math::
    m &= \mu\,\Phi(h) + v\sqrt\tau\,\varphi, \\
    \mathrm{Var} &= v\bigl[\Phi(h)^2 + (\mu^2 + v) D' + 2h\varphi\,(\tau\Phi(h) - (1+\tau)E)
        + (1-\tau)\varphi\,(2a\phi(k) - \varphi)\bigr].

Derivatives with respect to v are half the second derivatives with respect to μ (Price's theorem).

Source: for T, Owen (1956), "Tables for computing bivariate normal probabilities".

**Sine and cosine** have

.. math::
    \mathrm E[\sin x] = e^{-\sigma^2/2}\sin\mu, \qquad
    \mathrm{Var}[\sin x] = \tfrac12(1 - e^{-\sigma^2})\bigl((1 - e^{-\sigma^2}) + 2e^{-\sigma^2}\cos^2\mu\bigr),

and the same formulas hold with sine and cosine exchanged. All terms are nonnegative, so there is no cancellation.

**Steps and ramps** (sigmoid, tanh, erf, softplus, SiLU, the tanh approximation of GELU) share the quadrature of
:mod:`pyro_dvi.moments.smooth`; ELU and mish share the quadrature of :class:`~pyro_dvi.moments.quadrature.BothSides`,
which costs several times as much as a sigmoid. Both quadratures are accurate to 1e-8 (float64) and 1e-4 (float32).
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.moments.arithmetic import mul
from pyro_dvi.moments.dispatch import Kind
from pyro_dvi.moments.quadrature import (
    DENSITY,
    ROOT_HALF,
    BothSides,
    constants,
    distribution,
    elementwise_rule,
    gauss_legendre,
    through,
)
from pyro_dvi.moments.rules import moment_rule
from pyro_dvi.moments.smooth import Rescaled, Smooth
from pyro_dvi.moments.value import GaussianMoments

# Steps and ramps ----------------------------------------------------------------------------------------------

_CUBIC = 0.044715  # in the tanh approximation of GELU
_RATE = 2 * math.sqrt(2 / math.pi)


def _sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(x)
    return s, s - s * s


def _softplus(x: Tensor) -> tuple[Tensor, Tensor]:
    # Large positive means, whose exponential would overflow, do not occur here: they are mirrored.
    return torch.exp(x).log1p_(), torch.sigmoid(x)


def _silu(x: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(x)
    f = x * s
    return f, torch.addcmul(s + f, f, s, value=-1)


def _gelu_tanh(x: Tensor) -> tuple[Tensor, Tensor]:
    xx = x * x
    s = torch.sigmoid((xx * (_RATE * _CUBIC)).add_(_RATE).mul_(x))
    f = x * s
    rate = xx.mul_(3 * _RATE * _CUBIC).add_(_RATE)
    return f, torch.addcmul(s, f * rate, 1 - s)


def _normal(x: Tensor) -> tuple[Tensor, Tensor]:
    return distribution(x), (x * x).mul_(-0.5).exp_().mul_(DENSITY)


_STEP = Smooth(_sigmoid, False, "f = 1 / (1 + exp(-x)); slope = f - f * f;")
_NORMAL_IN_CPP = f"f = T(0.5) * erfc(x * T(-{ROOT_HALF})); slope = exp(T(-0.5) * x * x) * T({DENSITY});"
_NORMAL_STEP = Smooth(_normal, False, _NORMAL_IN_CPP, steep=True)
_RAMP = Smooth(_softplus, True, "f = log1p(exp(x)); slope = 1 / (1 + exp(-x));")
_SILU = Smooth(_silu, True, "slope = 1 / (1 + exp(-x)); f = x * slope; slope += f - f * slope;")

sigmoid = elementwise_rule(Rescaled(torch.sigmoid, _STEP), F.sigmoid, torch.sigmoid, torch.special.expit)
elementwise_rule(Rescaled(torch.tanh, _STEP, inner=2.0, outer=2.0), F.tanh, torch.tanh)
elementwise_rule(
    Rescaled(torch.erf, _NORMAL_STEP, inner=math.sqrt(2), outer=2.0), torch.erf, torch.special.erf
)
elementwise_rule(Rescaled(F.logsigmoid, _RAMP, inner=-1.0, outer=-1.0), F.logsigmoid)
elementwise_rule(Rescaled(F.silu, _SILU), F.silu)

_GELU_IN_CPP = f"""f = T({_RATE * _CUBIC}) * x * x; slope = 1 / (1 + exp(-x * (f + T({_RATE}))));
    third = 3 * f + T({_RATE}); f = x * slope; slope += f * third * (1 - slope);"""
_GELU_TANH = Rescaled(partial(F.gelu, approximate="tanh"), Smooth(_gelu_tanh, True, _GELU_IN_CPP, steep=True))


@moment_rule(F.softplus, kind=Kind.ELEMENTWISE)
def softplus(input: GaussianMoments, beta: float = 1, threshold: float = 20) -> GaussianMoments:
    r"""Moments of :math:`\log(1 + e^{\beta x}) / \beta`.

    Torch replaces the function by x where :math:`\beta x` exceeds the threshold. The rule does not; the difference is
    at most :math:`e^{-\mathrm{threshold}}/\beta`.

    Example:
        >>> softplus(GaussianMoments(torch.zeros(1), torch.ones(1))).loc
        tensor([0.8061])
    """
    centre = partial(F.softplus, beta=beta, threshold=threshold)
    return through(Rescaled(centre, _RAMP, inner=float(beta), outer=1 / beta), input)


@moment_rule(F.gelu, kind=Kind.ELEMENTWISE)
def gelu(input: GaussianMoments, *, approximate: str = "none") -> GaussianMoments:
    r"""Moments of :math:`x\,\Phi(x)`, or of its tanh approximation.

    Status: exact for Gaussian x, with closed forms and Owen's T function; the rule for the tanh approximation is as
    accurate as :func:`softplus`.

    Example:
        >>> gelu(GaussianMoments(torch.zeros(1), torch.ones(1))).loc
        tensor([0.2821])
    """
    return through(_GELU_TANH if approximate == "tanh" else _moments_of_gelu, input)


@moment_rule(F.glu)
def glu(input: GaussianMoments, dim: int = -1) -> GaussianMoments:
    r"""Moments of :math:`a\,\mathrm{sigmoid}(b)`, where a and b are the halves of the input along ``dim``.

    Status: as accurate as the rule of the sigmoid, for independent elements.

    Example:
        >>> glu(GaussianMoments(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0])))
        GaussianMoments(loc=tensor([1.]), variance=tensor([0.2500]))
    """
    halves = zip(torch.chunk(input.loc, 2, dim), torch.chunk(input.variance, 2, dim), strict=True)
    values, gates = (GaussianMoments(loc, variance) for loc, variance in halves)
    return mul(values, sigmoid(gates))


# GELU -----------------------------------------------------------------------------------------------------------

_DOUBLE, _SINGLE = gauss_legendre(11), gauss_legendre(5)


class _Integrals:
    """Terms that the formulas share: τ, h, a, Φ(h), φ(h), D' and E'."""

    def __init__(self, mu: Tensor, variance: Tensor) -> None:
        self.tau = tau = (variance + 1).reciprocal_()
        self.root = root = tau.sqrt()
        self.a = a = (variance * 2).add_(1).rsqrt_()
        self.h = h = (mu * root).clamp_(-1e4, 1e4)  # so that h^k φ(h) is 0, not inf times 0
        self.cdf = torch.special.erfc(h * -ROOT_HALF).mul_(0.5)
        half = (h * h).mul_(-0.5)
        self.density = density = half.exp().mul_(DENSITY)
        length = variance * a.square().mul_(2).div_(a + 1)  # 1 - a
        x, w = (constants(c, h) for c in (_DOUBLE if h.dtype is torch.float64 else _SINGLE))
        t = torch.addcmul(a, length, x)
        t.mul_(t)
        terms = (half * t).exp_().mul_(w)
        wide, narrow = terms.sum(0), terms.div_(t.add_(1)).sum(0)
        per_variance = length.div_(variance)
        self.d = narrow.mul_(per_variance).mul_(density).mul_(math.sqrt(2 / math.pi))
        self.e = wide.mul_(per_variance).mul_(h).mul_(DENSITY)


def _moments_of_gelu(mu: Tensor, variance: Tensor, slopes: bool) -> list[Tensor]:
    r"""Moments of :math:`x\,\Phi(x)`, and their slopes."""
    i = _Integrals(mu, variance)
    tau, h, a, cdf, f, d, e = i.tau, i.h, i.a, i.cdf, i.density, i.d, i.e
    e_v = e * variance
    hh = h * h
    far = (hh * a.square()).mul_(-0.5).exp_().mul_(DENSITY).mul_(a)  # a φ(k)
    slope = f * i.root  # the density of N(0, 1 + v) at μ
    ratio = 1 - tau  # v / (1 + v)
    second = (variance + 1).mul_(hh).add_(variance).mul_(d)
    lean = (tau * cdf).sub_(e_v).addcmul_(tau, e_v, value=-1)
    spread = cdf.square().add_(second).addcmul_(h * f, lean, value=2)
    spread.add_((2 * far - f).mul_(ratio).mul_(f)).mul_(variance)
    mean = torch.addcmul(mu * cdf, variance, slope)
    if not slopes:
        return [mean, spread]
    th = tau * hh
    curvature = (1 + tau).sub_(th)
    by_mu = (curvature * cdf).addcmul_(h, (tau + a * a).mul_(far).addcmul_(tau, f, value=-1))
    by_mu.addcmul_(e, variance * (tau + 2) + th, value=-1).mul_(slope).addcdiv_(h * d, i.root).mul_(
        variance * 2
    )
    left = (3 * tau * tau - 1).addcmul_(tau * ratio, hh).mul_(cdf)
    left.addcmul_((1 + 3 * tau).sub_(th).mul_(tau), e_v, value=-1)
    aa = a * a
    right = (tau * tau).addcmul_(1 - aa, tau + aa, value=-1).mul_(hh).addcmul_(ratio, (2 + 2 * tau).add_(aa))
    by_variance = left.mul_(h).addcmul_(right, far).addcmul_(ratio * f, curvature, value=-1).mul_(f)
    by_variance.addcmul_(cdf, cdf).addcmul_(variance, d)
    return [
        mean,
        spread,
        torch.addcmul(cdf, f, tau * h),
        curvature.mul_(slope).mul_(0.5),
        by_mu,
        by_variance,
    ]


# Quadrature on both sides of zero -------------------------------------------------------------------------------


def _mish_difference(x: Tensor, mu: Tensor, delta: Tensor) -> Tensor:
    # mish(x) = x (1 - 2/n), n = (1 + e^x)² + 1; beyond 20 it is x to rounding.
    e, at_mean = torch.exp(x.clamp_max(20.0)), torch.exp(mu.clamp_max(20.0))
    rise = torch.maximum(e, at_mean) * torch.copysign(torch.expm1(-delta.abs()), delta)  # e^x - e^μ
    n, n_at_mean = (1 + e).square() + 1, (1 + at_mean).square() + 1
    return delta * (e * (e + 2) / n) + 2 * mu * rise * (e + at_mean + 2) / n / n_at_mean


def _elu_difference(x: Tensor, mu: Tensor, delta: Tensor, alpha: float) -> Tensor:
    # The distance from μ to x is split at zero: α(e^x - 1) to the left, x to the right.
    left = torch.minimum(delta, -mu) - (-mu).clamp_max(0)
    right = torch.maximum(delta, -mu) - (-mu).clamp_min(0)
    highest = torch.exp(torch.maximum(x, mu).clamp_max(0))
    return right + alpha * highest * torch.copysign(torch.expm1(-left.abs()), left)


elementwise_rule(BothSides(F.mish, _mish_difference, width=8.0), F.mish)


@moment_rule(F.elu, kind=Kind.ELEMENTWISE)
def elu(input: GaussianMoments, alpha: float = 1.0) -> GaussianMoments:
    r"""Moments of ELU, which is x for positive x and :math:`\alpha(e^x - 1)` otherwise.

    Example:
        >>> elu(GaussianMoments(torch.zeros(1), torch.ones(1))).loc
        tensor([0.1605])
    """
    difference = partial(_elu_difference, alpha=float(alpha))
    return through(BothSides(partial(F.elu, alpha=alpha), difference, width=8.0), input)


@moment_rule(F.selu, torch.selu, kind=Kind.ELEMENTWISE)
def selu(input: GaussianMoments) -> GaussianMoments:
    """Moments of the scaled ELU of self-normalising networks."""
    y = elu(input, 1.6732632423543772)
    scale = 1.0507009873554805
    return GaussianMoments(scale * y.loc, scale**2 * y.variance)


# Exponentials and waves -----------------------------------------------------------------------------------------


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
    """Moments of the cosine. Status: exact for Gaussian x, like :func:`sin`."""
    return _wave(torch.cos(input.loc), torch.sin(input.loc), input.variance)


def _wave(value: Tensor, other: Tensor, variance: Tensor) -> GaussianMoments:
    lost = -torch.expm1(-variance)
    return GaussianMoments(
        value * torch.exp(-0.5 * variance), 0.5 * lost * (lost + 2 * torch.exp(-variance) * other.square())
    )
