# SPDX-License-Identifier: Apache-2.0
r"""GELU and erf, the functions of the normal distribution function, in closed form with their derivatives.

Let :math:`x\sim\mathcal N(\mu, v)`, :math:`\tau = 1/(1+v)`, :math:`a = 1/\sqrt{1+2v}`, :math:`h = \mu\sqrt\tau` and
:math:`k = ah`. Then :math:`\mathrm E[\Phi(x)] = \Phi(h)`, and with Owen's function T

.. math::
    D = \mathrm{Var}[\Phi(x)] = 2T(h, 1) - 2T(h, a)
      = \frac{1}{\pi}\int_a^1 \frac{e^{-h^2(1+t^2)/2}}{1+t^2}\,dt, \qquad
    E = \Phi(h) - \Phi(k) = \frac{h}{\sqrt{2\pi}}\int_a^1 e^{-h^2t^2/2}\,dt,

two integrals of the same exponential, by Gauss-Legendre. Both shrink with v (the interval is
:math:`1 - a = 2va^2/(1+a)` long), so that all formulas below keep their digits however small v is: the text writes
:math:`D = vD'` and :math:`E = vE'`.

By Stein's lemma (twice :math:`\mathrm E[x\,f(x)] = \mu\,\mathrm E f + v\,\mathrm E f'`), and with
:math:`\varphi = \phi(h)`, the moments of :math:`x\,\Phi(x)` are

.. math::
    m &= \mu\,\Phi(h) + v\sqrt\tau\,\varphi, \\
    \mathrm{Var} &= v\bigl[\Phi(h)^2 + (\mu^2 + v) D' + 2h\varphi\,(\tau\Phi(h) - (1+\tau)E)
        + (1-\tau)\varphi\,(2a\phi(k) - \varphi)\bigr].

Derivatives in v are half of second derivatives in μ (Price's theorem).

Source: for T, Owen (1956), "Tables for computing bivariate normal probabilities".
"""

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ROOT_HALF = math.sqrt(0.5)
DENSITY = 1 / math.sqrt(2 * math.pi)  # at zero
Column = tuple[tuple[float], ...]
Nodes = tuple[Column, Column]


def constants(numbers: Any, like: Tensor) -> Tensor:
    """Return a number or a tuple of numbers as a tensor like another one, made once for each dtype and device.

    What traces a program (``torch.compile``, ``torch.export``) makes its own.
    """
    if type(like) is not Tensor or torch.compiler.is_compiling():
        return torch.tensor(numbers, dtype=like.dtype, device=like.device)
    return _kept(numbers, like.dtype, like.device)


@lru_cache(maxsize=256)
def _kept(numbers: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # an inference tensor could not take part in training later
        return torch.tensor(numbers, dtype=dtype, device=device)


@lru_cache(maxsize=64)
def gauss_hermite(order: int) -> Nodes:
    """Return nodes and weights for the standard Gaussian; weights sum to one."""
    z, w = np.polynomial.hermite_e.hermegauss(order)
    return column(z), column(w / w.sum())


def gauss_legendre(order: int) -> Nodes:
    """Return nodes and weights on [0, 1]."""
    x, w = np.polynomial.legendre.leggauss(order)
    return column(0.5 + 0.5 * x), column(0.5 * w)


def column(numbers: Any) -> Column:
    """Return an array as a column of numbers that :func:`constants` takes: one for each node, before elements."""
    return tuple((float(x),) for x in numbers)


_DOUBLE, _SINGLE = gauss_legendre(11), gauss_legendre(5)
_HALF_LINES = (9.0, gauss_legendre(48)), (6.5, gauss_legendre(26))


def distribution(z: Tensor) -> Tensor:
    r"""Return :math:`\Phi(z)`, by erfc, which keeps its digits in the left tail."""
    return torch.special.erfc(z * -_ROOT_HALF) * 0.5


def half_line(dtype: torch.dtype) -> tuple[float, Nodes]:
    """Return how many deviations count, and nodes and weights on [0, 1] for one side of a cut."""
    return _HALF_LINES[dtype is not torch.float64]


class _Integrals:
    """What the formulas share: τ, h, a, Φ(h), φ(h), D' and E'."""

    def __init__(self, mu: Tensor, variance: Tensor) -> None:
        self.tau = tau = (variance + 1).reciprocal_()
        self.root = root = tau.sqrt()
        self.a = a = (variance * 2).add_(1).rsqrt_()
        self.h = h = (mu * root).clamp_(-1e4, 1e4)  # so that h^k φ(h) is 0, not inf times 0
        self.cdf = torch.special.erfc(h * -_ROOT_HALF).mul_(0.5)
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


def moments_of_erf(mu: Tensor, variance: Tensor, slopes: bool) -> list[Tensor]:
    r"""Moments of :math:`\mathrm{erf}(x) = 2\Phi(\sqrt2 x) - 1`, and their slopes."""
    mu, variance = mu * math.sqrt(2), variance * 2
    i = _Integrals(mu, variance)
    mean, spread = torch.erf(i.h * _ROOT_HALF), (i.d * variance).mul_(4)
    if not slopes:
        return [mean, spread]
    slope = i.density * i.root  # the density of N(0, 1 + v) at μ
    e = i.e.mul_(variance)
    far = (i.h * i.a).square_().mul_(-0.5).exp_().mul_(DENSITY).mul_(i.a)  # a φ(k)
    return [
        mean,
        spread,
        slope * math.sqrt(8),
        (i.h * i.root).mul_(slope).mul_(-2),
        (e * slope).mul_(-8 * math.sqrt(2)),
        far.addcmul_(i.h, e).mul_(i.density).mul_(i.tau).mul_(8),
    ]


def moments_of_gelu(mu: Tensor, variance: Tensor, slopes: bool) -> list[Tensor]:
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
