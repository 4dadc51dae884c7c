# SPDX-License-Identifier: Apache-2.0
r"""Smooth functions that are straight far from zero: sigmoid, tanh, softplus, SiLU, GELU, mish.

Two quadratures share the work; which one holds is decided for each element.

*Narrow Gaussians* (σ below ``crossover``): Gauss-Hermite around f(μ), with :math:`d = f(\mu+\sigma z) - f(\mu)`,

.. math::
    m = f(\mu) + \mathrm E[d], \qquad v = \mathrm E[d^2] - \mathrm E[d]^2,

which keeps its digits however small σ is. It converges as :math:`e^{-2\rho\sqrt{n}/\sigma}` where ρ is the distance of
the poles of f from the real line, so it fails for wide Gaussians.

*Wide Gaussians*: f is a smoothed copy of its straight ends plus a remainder that is zero beyond a few units,

.. math:: f(x) = q(x)\,\Phi(x/s) + r_1(x), \qquad f(x)^2 = q(x)^2\,\Phi(x/s) + r_2(x), \qquad q = 1 \text{ or } x.

The first terms have closed forms. The remainders are integrated by the trapezoidal rule on a fixed lattice,

.. math:: \mathrm E[r(x)] \approx h\sum_k r(x_k)\,\mathcal N(x_k; \mu, \sigma^2),

where all :math:`r(x_k)` are constants; its error falls as :math:`e^{-2\pi\rho/h}`, and derivatives in μ and σ² are
those of the Gaussian.

A mean on the right is mirrored, :math:`f(x) = q(x) \pm g(-x)`, so that no digits cancel far from zero in either.

Derivatives in σ² are half of second derivatives in μ (Price's theorem).

Status: exact up to rounding and the stated quadrature error (below 1e-8 in float64, 1e-4 in float32, for any σ).

Source: for the lattice, Trefethen & Weideman (2014), "The exponentially convergent trapezoidal rule".
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_dvi.moments.activations.partials import Partials, Result

__all__ = ["Rescaled", "Smooth"]

_ROOT_HALF = math.sqrt(0.5)
_DENSITY = 1 / math.sqrt(2 * math.pi)
_SERIES = (1e-6, 1e-3)  # variances in float64 and float32
_BLOCK = {"cpu": 1 << 13}  # elements at a time: what a block writes stays in the cache
_BLOCK_ELSEWHERE = 1 << 21


@dataclass(frozen=True, eq=False)
class Smooth:
    r"""A function that is 0 far to the left and 1 (a step) or x (a ramp) far to the right.

    Attributes:
        value_and_slope: f and its derivative.
        ramp: whether f follows x to the right; else it tends to 1.
        smoothing: s, the width of the smoothed end.
        mirror: the same for g with :math:`f(x) = x + g(-x)` (ramp) or :math:`f(x) = 1 - g(-x)` (step); None if it is f.
        crossover: the deviation at which the lattice takes over.
        reach: half the length of the lattice in float64 and float32.
        spacing: of the lattice, likewise.
        order: of Gauss-Hermite, likewise.
    """

    value_and_slope: Callable[[Tensor], tuple[Tensor, Tensor]]
    ramp: bool
    smoothing: float
    mirror: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    crossover: float = 1.0
    reach: tuple[float, float] = (26.0, 13.0)
    spacing: tuple[float, float] = (0.55, 0.9)
    order: tuple[int, int] = (24, 12)

    def around(self, mu: Tensor, variance: Tensor, slopes: bool) -> Result:
        """Return the difference of the mean from f(μ), and the variance, block by block."""
        block = _BLOCK.get(mu.device.type, _BLOCK_ELSEWHERE)
        pieces = [
            self._block(*piece, slopes)
            for piece in zip(mu.reshape(-1).split(block), variance.reshape(-1).split(block), strict=True)
        ]
        whole = pieces[0] if len(pieces) == 1 else [torch.cat(p) for p in zip(*pieces, strict=True)]
        shift, spread, *partials = (t.reshape(mu.shape) for t in whole)
        return Result(shift, spread, Partials(*partials) if slopes else None)

    def _block(self, mu: Tensor, variance: Tensor, slopes: bool) -> list[Tensor]:
        right = mu > 0
        y = -mu.abs()
        wide = variance > self.crossover**2
        if (
            mu.device.type == "cpu" and not torch.compiler.is_compiling()
        ):  # where a look at the values costs nothing
            left = self._each_on_its_side(y, variance, right, wide, slopes)
            return self._mirrored_back(left, variance, right)
        near = self._near(y, variance.clamp_max(self.crossover**2), right, slopes)
        far = self._far(y, variance.clamp_min(self.crossover**2), right, slopes)
        left = [torch.where(wide, a, b) for a, b in zip(far, near, strict=True)]
        return self._mirrored_back(left, variance, right)

    def _each_on_its_side(
        self, y: Tensor, variance: Tensor, right: Tensor, wide: Tensor, slopes: bool
    ) -> list[Tensor]:
        count = int(wide.sum())
        if count in (0, len(wide)):
            return (self._far if count else self._near)(y, variance, right, slopes)
        whole: list[Tensor] = []
        for mask, branch in ((wide, self._far), (~wide, self._near)):
            index = mask.nonzero()[:, 0]
            values = branch(y[index], variance[index], right[index], slopes)
            whole = whole or [torch.empty_like(y) for _ in values]
            for total, value in zip(whole, values, strict=True):
                total[index] = value
        return whole

    def _near(self, y: Tensor, variance: Tensor, right: Tensor, slopes: bool) -> list[Tensor]:
        """Gauss-Hermite around f(y): shift of the mean, variance, E f', then slopes and E f'''."""
        single = y.dtype is not torch.float64
        z, w = _gauss_hermite(self.order[single], y.dtype, y.device)
        sigma = variance.sqrt()
        centre = self._values(y, right)[0]
        f, slope = self._values(torch.addcmul(y, sigma, z), right)
        d = f - centre
        wd = w * d
        shift = wd.sum(0)
        ws = w * slope
        first = ws.sum(0)  # E f'
        wsz = ws * z
        second = wsz.sum(0)  # E[f' z] = σ E f''
        third = (wsz * z).sum(0) - first  # σ² times the third derivative
        spread = wd.mul_(d).sum(0).sub_(shift.square())
        # Differences d near rounding: E d = σ² E f'' / 2, and three terms of Var f = σ² Σ E[f' He_k(z)]² / (k + 1)!.
        tiny = variance < _SERIES[single]
        shift = torch.where(tiny, 0.5 * sigma * second, shift)
        series = torch.addcmul(first.square(), second, second, value=0.5).addcmul_(third, third, value=1 / 6)
        spread = torch.where(tiny, series.mul_(variance), spread)
        if not slopes:
            return [shift, spread, first]
        cross, cross_z = ws.mul_(d).sum(0), wsz.mul_(d).sum(0)
        by_mu = 2 * torch.addcmul(cross, shift, first, value=-1)
        by_variance = torch.addcmul(cross_z, shift, second, value=-1) / sigma
        return [
            shift,
            spread,
            first,
            0.5 * second / sigma,
            torch.where(tiny, sigma * second * (2 * first + third), by_mu),
            torch.where(tiny, torch.addcmul(first * (first + third), second, second), by_variance),
            third / variance,
        ]

    def _far(self, y: Tensor, variance: Tensor, right: Tensor, slopes: bool) -> list[Tensor]:
        """The same by closed forms of the ends, and the lattice."""
        rest = self._rest(y, variance, right, slopes)
        ends = _straight_ends(y, variance, self.smoothing, self.ramp)
        if slopes:
            f, f1, f2, f3, s, s1, s2 = (a + b for a, b in zip(ends, rest, strict=True))
        else:
            f, f1, s = ends[0] + rest[0], ends[1] + rest[1], ends[4] + rest[2]
        shift, spread = f - self._values(y, right)[0], torch.addcmul(s, f, f, value=-1)
        if not slopes:
            return [shift, spread, f1]
        return [shift, spread, f1, 0.5 * f2, s1 - 2 * f * f1, 0.5 * s2 - f * f2, f3]

    def _values(self, x: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        f = self.value_and_slope(x)
        if self.mirror is None:
            return f
        g = self.mirror(x)
        return torch.where(right, g[0], f[0]), torch.where(right, g[1], f[1])

    def _mirrored_back(self, g: list[Tensor], variance: Tensor, right: Tensor) -> list[Tensor]:
        r"""Undo the reflection of means on the right.

        A step is :math:`1 - g(-x)`. A ramp is :math:`x + g(-x)`, of variance
        :math:`\mathrm{Var}\,g + \sigma^2 - 2\sigma^2\,\mathrm E[g']` by Stein's lemma.
        """
        shift, spread, a, *rest = g
        if not self.ramp:
            shift = torch.where(right, -shift, shift)
            if not rest:
                return [shift, spread]
            b, c, d, _ = rest
            return [shift, spread, a, torch.where(right, -b, b), torch.where(right, -c, c), d]
        excess = 1 - 2 * a
        spread = torch.where(right, torch.addcmul(spread, variance, excess), spread)
        if not rest:
            return [shift, spread]
        b, c, d, third = rest
        c = torch.where(right, 4 * variance * b - c, c)
        d = torch.where(right, d + torch.addcmul(excess, variance, third, value=-1), d)
        return [shift, spread, torch.where(right, 1 - a, a), b, c, d]

    def _rest(self, y: Tensor, variance: Tensor, right: Tensor, slopes: bool) -> tuple[Tensor, ...]:
        """Expected remainders of f (to the third derivative in the mean) and f² (to the second); else fewer."""
        x, r1, r2, q1, q2 = _lattice(self, y.dtype, y.device)
        if self.mirror is not None:
            r1, r2 = torch.where(right, q1, r1), torch.where(right, q2, r2)
        inverse = variance.rsqrt()
        u = (x - y) * inverse
        density = (u * u).mul_(-0.5).exp_()
        sums = []
        for values, orders in ((r1, 4), (r2, 3)) if slopes else ((r1, 2), (r2, 1)):
            if values is None:
                sums.append([torch.zeros_like(y)] * orders)
                continue
            term = density * values
            moments = [term.sum(0)]
            for _ in range(orders - 1):
                term = term.mul_(u)
                moments.append(term.sum(0))
            sums.append(moments)
        if not slopes:
            (a0, a1), (b0,) = sums
            return a0 * inverse, a1 * inverse**2, b0 * inverse
        (a0, a1, a2, a3), (b0, b1, b2) = sums
        i1, i2, i3, i4 = inverse, inverse**2, inverse**3, inverse**4
        return (
            a0 * i1, a1 * i2, (a2 - a0) * i3, (a3 - 3 * a1) * i4,
            b0 * i1, b1 * i2, (b2 - b0) * i3,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Rescaled:
    """The function ``outer * f(inner * x) + constant`` for a smooth step or ramp f.

    Attributes:
        centre: the function itself, for its value at the mean.
        smooth: f.
        inner: factor of the argument.
        outer: factor of the value.
    """

    centre: Callable[[Tensor], Tensor]
    smooth: Smooth
    inner: float = 1.0
    outer: float = 1.0

    def __call__(self, mu: Tensor, variance: Tensor, slopes: bool) -> Result:
        """Return mean and variance."""
        i, o = self.inner, self.outer
        if i == o == 1:
            shift, spread, partials = self.smooth.around(mu, variance, slopes)
            return Result(shift.add_(self.centre(mu)), spread, partials)
        shift, spread, partials = self.smooth.around(i * mu, i * i * variance, slopes)
        if partials is not None:
            a, b, c, d = partials
            partials = Partials(o * i * a, o * i * i * b, o * o * i * c, (o * i) ** 2 * d)
        return Result(torch.add(self.centre(mu), shift, alpha=o), o * o * spread, partials)


def _straight_ends(y: Tensor, variance: Tensor, smoothing: float, ramp: bool) -> tuple[Tensor, ...]:
    r"""Expectations of q Φ(x/s) to the third, and of q² Φ(x/s) to the second derivative in the mean.

    Every power of x follows from :math:`\mathrm E[x h(x)] = \mu H + \sigma^2 H'`, with
    :math:`H(\mu) = \mathrm E[h(x)]`.
    """
    inverse = (variance + smoothing**2).rsqrt()
    z = y * inverse
    zz = z * z
    p0 = torch.special.erfc(z * -_ROOT_HALF) * 0.5
    p1 = torch.exp(-0.5 * zz) * (_DENSITY * inverse)
    p2 = -z * p1 * inverse
    p3 = (zz - 1) * p1 * inverse**2
    if not ramp:
        return p0, p1, p2, p3, p0, p1, p2
    p4 = z * (3 - zz) * p1 * inverse**3
    g0 = y * p0 + variance * p1
    g1 = p0 + y * p1 + variance * p2
    g2 = 2 * p1 + y * p2 + variance * p3
    g3 = 3 * p2 + y * p3 + variance * p4
    return (
        g0,
        g1,
        g2,
        g3,
        y * g0 + variance * g1,
        g0 + y * g1 + variance * g2,
        2 * g1 + y * g2 + variance * g3,
    )


@lru_cache(maxsize=64)
def _gauss_hermite(order: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    z, w = np.polynomial.hermite.hermgauss(order)
    z, w = z * math.sqrt(2), w / math.sqrt(math.pi)
    return tuple(torch.from_numpy(a)[:, None].to(device, dtype) for a in (z, w))  # type: ignore[return-value]


@lru_cache(maxsize=64)
def _lattice(function: Smooth, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """Points, and remainders of f, f² and of their mirror images there, times spacing and the Gaussian's constant."""
    which = dtype is not torch.float64
    reach, spacing = function.reach[which], function.spacing[which]
    count = math.ceil(reach / spacing)
    x = torch.arange(-count, count + 1, dtype=torch.float64) * spacing
    step = torch.special.ndtr(x / function.smoothing)
    end = x if function.ramp else torch.ones_like(x)
    columns = [x]
    for form in (function.value_and_slope, function.mirror or function.value_and_slope):
        f = form(x)[0]
        columns += [spacing * _DENSITY * (f**power - end**power * step) for power in (1, 2)]
    if columns[1].abs().max() < 1e-14:  # f is its own smoothed end
        return (*(None if k in (1, 3) else c[:, None].to(device, dtype) for k, c in enumerate(columns)),)
    return (*(column[:, None].to(device, dtype) for column in columns),)
