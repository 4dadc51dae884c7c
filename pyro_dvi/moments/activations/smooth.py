# SPDX-License-Identifier: Apache-2.0
r"""Smooth functions that are straight far from zero: sigmoid, tanh, softplus, SiLU, GELU by tanh, mish.

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
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_dvi.moments.activations.normal import DENSITY, distribution, gauss_hermite

__all__ = ["Rescaled", "Smooth"]

_SERIES = (1e-6, 1e-3)  # variances in float64 and float32
Form = Callable[[Tensor], tuple[Tensor, Tensor]]
Levels = tuple[tuple[float, int], ...]
_LEVELS: tuple[Levels, Levels] = (((0.3, 12), (1.0, 24)), ((0.5, 6), (1.0, 11)))


@dataclass(frozen=True, eq=False)
class Smooth:
    r"""A function that is 0 far to the left and 1 (a step) or x (a ramp) far to the right.

    Attributes:
        value_and_slope: f and its derivative.
        ramp: whether f follows x to the right; else it tends to 1.
        smoothing: s, the width of the smoothed end.
        levels: up to which deviation how many nodes of Gauss-Hermite do, in float64 and float32. Beyond the last the
            lattice takes over. The others serve blocks without wider elements.
        reach: half the length of the lattice, likewise.
        spacing: of the lattice, likewise.
        mirror: the same for g with :math:`f(x) = x + g(-x)` (ramp) or :math:`f(x) = 1 - g(-x)` (step); None if it is f.
    """

    value_and_slope: Form
    ramp: bool
    smoothing: float
    levels: tuple[Levels, Levels] = _LEVELS
    reach: tuple[float, float] = (26.0, 13.0)
    spacing: tuple[float, float] = (0.55, 0.9)
    mirror: Form | None = None
    _tables: tuple["_Table", "_Table"] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_tables", (_Table.of(self, 0), _Table.of(self, 1)))

    def around(self, mu: Tensor, variance: Tensor, slopes: bool) -> list[Tensor]:
        """Return the difference of the mean from f(μ) and the variance, and the slopes of both."""
        # The side is -1 on the right. Products: torch.where is slow on CPU.
        block = _Block(-mu.abs(), variance, torch.copysign(torch.ones_like(mu), -mu), slopes)
        table = self._tables[mu.dtype is not torch.float64]
        return self._mirrored_back(block, self._split(table, block) or self._everywhere(table, block))

    def _everywhere(self, table: "_Table", block: "_Block") -> list[Tensor]:
        """Run both quadratures on all elements."""
        limit, nodes = table.levels[-1]
        variance = block.variance
        near = self._near(table, nodes, block.with_variance(variance.clamp_max(limit)), True)
        far = self._far(table, block.with_variance(variance.clamp_min(limit)))
        return [torch.where(variance > limit, a, b) for a, b in zip(far, near, strict=True)]

    def _split(self, table: "_Table", block: "_Block") -> list[Tensor]:
        """Run on each element the quadrature it needs, where a look at the values costs nothing; elsewhere nothing."""
        y = block.y
        if y.device.type != "cpu" or torch.compiler.is_compiling() or y.numel() == 0:
            return []
        low, high = (t.item() for t in block.variance.aminmax())
        limit, finest = table.levels[-1]
        if high <= limit:
            nodes = next(nodes for largest, nodes in table.levels if high <= largest)
            return self._near(table, nodes, block, low < table.series)
        if low > limit:
            return self._far(table, block)
        wide = block.variance > limit
        far, near = wide.nonzero()[:, 0], (~wide).nonzero()[:, 0]
        pairs = [
            (far, self._far(table, block.at(far))),
            (near, self._near(table, finest, block.at(near), low < table.series)),
        ]
        whole = [torch.empty_like(y) for _ in pairs[0][1]]
        for index, values in pairs:
            for total, value in zip(whole, values, strict=True):
                total.scatter_(0, index, value)
        return whole

    def _near(self, table: "_Table", nodes: "_Nodes", block: "_Block", some_tiny: bool) -> list[Tensor]:
        """Gauss-Hermite around f(y): shift of the mean, variance, E f', then slopes and E f'''."""
        y, variance, side, slopes = block
        sigma = variance.sqrt()
        centre = self._values(y, side)[0]
        # E d, E d², E f', E[f' z], E[f' z²], then E[d f'] and E[d f' z]
        shift, spread, first, second, third, *cross = (torch.zeros_like(y) for _ in range(7 if slopes else 5))
        for z, w in nodes:
            d, slope = self._values(torch.add(y, sigma, alpha=z), side)
            d = d - centre
            shift.add_(d, alpha=w)
            spread.addcmul_(d, d, value=w)
            first.add_(slope, alpha=w)
            second.add_(slope, alpha=w * z)
            third.add_(slope, alpha=w * z * z)
            if slopes:
                d.mul_(slope)
                cross[0].add_(d, alpha=w)
                cross[1].add_(d, alpha=w * z)
        third.sub_(first)  # σ² times the third derivative; E[f' z] = σ E f''
        spread.addcmul_(shift, shift, value=-1)
        by_mu = by_variance = third_slope = spread
        if slopes:
            by_mu = cross[0].addcmul_(shift, first, value=-1).mul_(2)
            by_variance = cross[1].addcmul_(shift, second, value=-1).div_(sigma)
            third_slope = third / variance
        if some_tiny:
            # Differences d near rounding: E d = σ² E f'' / 2, and three terms of
            # Var f = σ² Σ E[f' He_k(z)]² / (k + 1)!.
            tiny = variance < table.series
            shift = torch.where(tiny, 0.5 * sigma * second, shift)
            series = torch.addcmul(first.square(), second, second, value=0.5).addcmul_(
                third, third, value=1 / 6
            )
            spread = torch.where(tiny, series.mul_(variance), spread)
            if slopes:
                by_mu = torch.where(tiny, sigma * second * (2 * first + third), by_mu)
                series = torch.addcmul(first * (first + third), second, second)
                by_variance = torch.where(tiny, series, by_variance)
        if not slopes:
            return [shift, spread, first]
        return [shift, spread, first, second.div_(sigma).mul_(0.5), by_mu, by_variance, third_slope]

    def _far(self, table: "_Table", block: "_Block") -> list[Tensor]:
        """The same by closed forms of the ends, and the lattice."""
        y, variance, side, slopes = block
        rest = self._rest(table, block)
        ends = _straight_ends(y, variance, self.smoothing, self.ramp)
        if slopes:
            f, f1, f2, f3, s, s1, s2 = (a.add_(b) for a, b in zip(rest, ends, strict=True))
        else:
            f, f1, s = ends[0] + rest[0], ends[1] + rest[1], ends[4] + rest[2]
        shift, spread = f - self._values(y, side)[0], torch.addcmul(s, f, f, value=-1)
        if not slopes:
            return [shift, spread, f1]
        by_mu, by_variance = s1.addcmul_(f, f1, value=-2), s2.mul_(0.5).addcmul_(f, f2, value=-1)
        return [shift, spread, f1, f2.mul_(0.5), by_mu, by_variance, f3]

    def _values(self, x: Tensor, side: Tensor) -> tuple[Tensor, Tensor]:
        f = self.value_and_slope(x)
        if self.mirror is None:
            return f
        g = self.mirror(x)
        right = (1 - side).mul_(0.5)
        left = 1 - right
        return (g[0] * right).addcmul_(f[0], left), (g[1] * right).addcmul_(f[1], left)

    def _mirrored_back(self, block: "_Block", g: list[Tensor]) -> list[Tensor]:
        r"""Undo the reflection of means on the right.

        A step is :math:`1 - g(-x)`. A ramp is :math:`x + g(-x)`, of variance
        :math:`\mathrm{Var}\,g + \sigma^2 - 2\sigma^2\,\mathrm E[g']` by Stein's lemma.
        """
        variance, side = block.variance, block.side
        shift, spread, a, *rest = g
        if not self.ramp:
            shift = shift.mul_(side)
            if not rest:
                return [shift, spread]
            b, c, d, _ = rest
            return [shift, spread, a, b.mul_(side), c.mul_(side), d]
        right = (1 - side).mul_(0.5)  # 1 there
        excess = (1 - 2 * a).mul_(right)
        spread = torch.addcmul(spread, variance, excess)
        if not rest:
            return [shift, spread]
        b, c, d, third = rest
        right_variance = variance * right
        c = (c * side).addcmul_(right_variance, b, value=4)
        d = d.add_(excess).addcmul_(right_variance, third, value=-1)
        return [shift, spread, a.mul_(side).add_(right), b, c, d]

    def _rest(self, table: "_Table", block: "_Block") -> tuple[Tensor, ...]:
        """Expected remainders of f (to the third derivative in the mean) and f² (to the second); else fewer."""
        y, variance, side, slopes = block
        inverse = variance.rsqrt()
        start, right = y * -inverse, (1 - side).mul_(0.5)
        of_f, of_square = ([torch.zeros_like(y) for _ in range(n)] for n in ((4, 3) if slopes else (2, 1)))
        for x, direct, mirrored in table.lattice:
            u = torch.add(start, inverse, alpha=x).clamp_(-table.reach, table.reach)
            term = (u * u).mul_(-0.5).exp_()
            if mirrored is not None:
                r, rr = ((right * (g - f)).add_(f) for f, g in zip(direct, mirrored, strict=True))
            for k, total in enumerate(of_f):
                term = term.mul_(u) if k else term
                if mirrored is None:
                    total.add_(term, alpha=direct[0])
                else:
                    total.addcmul_(term, r)
                if k < len(of_square):
                    if mirrored is None:
                        of_square[k].add_(term, alpha=direct[1])
                    else:
                        of_square[k].addcmul_(term, rr)
        if not slopes:
            return of_f[0] * inverse, of_f[1] * inverse**2, of_square[0] * inverse
        (a0, a1, a2, a3), (b0, b1, b2) = of_f, of_square
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

    def __call__(self, mu: Tensor, variance: Tensor, slopes: bool) -> list[Tensor]:
        """Return mean and variance, and their slopes."""
        i, o = self.inner, self.outer
        if i == o == 1:
            shift, *rest = self.smooth.around(mu, variance, slopes)
            return [shift.add_(self.centre(mu)), *rest]
        shift, *rest = self.smooth.around(i * mu, i * i * variance, slopes)
        factors = (o * o, o * i, o * i * i, o * o * i, (o * i) ** 2)
        scaled = [factor * part for factor, part in zip(factors, rest, strict=False)]
        return [torch.add(self.centre(mu), shift, alpha=o), *scaled]


def _straight_ends(y: Tensor, variance: Tensor, smoothing: float, ramp: bool) -> tuple[Tensor, ...]:
    r"""Expectations of q Φ(x/s) to the third, and of q² Φ(x/s) to the second derivative in the mean.

    Every power of x follows from :math:`\mathrm E[x h(x)] = \mu H + \sigma^2 H'`, with
    :math:`H(\mu) = \mathrm E[h(x)]`.
    """
    inverse = (variance + smoothing**2).rsqrt()
    z = y * inverse
    zz = z * z
    p0 = distribution(z)
    p1 = torch.exp(-0.5 * zz) * (DENSITY * inverse)
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


class _Block(NamedTuple):
    """Elements whose means are mirrored to the left of zero; the side is -1 for those that were on the right."""

    y: Tensor
    variance: Tensor
    side: Tensor
    slopes: bool

    def at(self, index: Tensor) -> "_Block":
        """Return some of the elements."""
        y, variance, side = (t.index_select(0, index) for t in self[:3])
        return _Block(y, variance, side, self.slopes)

    def with_variance(self, variance: Tensor) -> "_Block":
        """Return the same means with other variances; the compiler of torch 2.8 does not know ``_replace``."""
        return _Block(self.y, variance, self.side, self.slopes)


_Nodes = tuple[tuple[float, float], ...]
_Pair = tuple[float, float]


class _Table(NamedTuple):
    """The numbers of a function in one precision, as Python floats, which every device and compiler takes.

    Attributes:
        series: the variance below which differences from f(μ) are lost.
        reach: deviations from the mean beyond which a density counts as zero: denormal numbers are slow.
        levels: limits of the variance, and nodes and weights of Gauss-Hermite below each.
        lattice: points, with the remainders of f and f² there, times spacing and the Gaussian's constant; then the
            same of the mirror image if it is another function.
    """

    series: float
    reach: float
    levels: tuple[tuple[float, _Nodes], ...]
    lattice: tuple[tuple[float, _Pair, _Pair | None], ...]

    @classmethod
    def of(cls, function: Smooth, precision: int) -> "_Table":
        levels = tuple((sigma**2, gauss_hermite(n)) for sigma, n in function.levels[precision])
        spacing = function.spacing[precision]
        count = math.ceil(function.reach[precision] / spacing)
        x = torch.arange(-count, count + 1, dtype=torch.float64, device="cpu") * spacing
        step = torch.special.ndtr(x / function.smoothing)
        end = x if function.ramp else torch.ones_like(x)

        def remainders(form: Form) -> list[_Pair]:
            f = form(x)[0]
            rows = [(spacing * DENSITY * (f**p - end**p * step)).tolist() for p in (1, 2)]
            return list(zip(*rows, strict=True))

        direct = remainders(function.value_and_slope)
        mirrored = [None] * len(direct) if function.mirror is None else remainders(function.mirror)
        return cls(
            _SERIES[precision],
            (36.0, 11.0)[precision],
            levels,
            tuple(zip(x.tolist(), direct, mirrored, strict=True)),
        )
