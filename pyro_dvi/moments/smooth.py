# SPDX-License-Identifier: Apache-2.0
r"""Smooth functions that are linear far from zero: sigmoid, tanh, erf, softplus, SiLU, and GELU's tanh approximation.

One of two quadratures is chosen for each element. On a CUDA device, :mod:`~pyro_dvi.moments.smooth_kernel` does this in
one kernel.

*Narrow Gaussians* (σ below ``crossover``) use Gauss-Hermite quadrature of :math:`d = f(\mu+\sigma z) - f(\mu)`,

.. math::
    m = f(\mu) + \mathrm E[d], \qquad v = \mathrm E[d^2] - \mathrm E[d]^2,

which is accurate however small σ is. The quadrature converges as :math:`e^{-2\rho\sqrt{n}/\sigma}`, where ρ is the
distance of the poles of f from the real line, so it fails for wide Gaussians.

For *wide Gaussians*, f is split into a smoothed copy of its linear tails and a remainder that vanishes beyond a few
units,

.. math:: f(x) = q(x)\,\Phi(x/s) + r_1(x), \qquad f(x)^2 = q(x)^2\,\Phi(x/s) + r_2(x), \qquad q = 1 \text{ or } x.

The first terms have closed forms. The remainders are integrated by the trapezoidal rule on a fixed lattice,

.. math:: \mathrm E[r(x)] \approx h\sum_k r(x_k)\,\mathcal N(x_k; \mu, \sigma^2),

where all :math:`r(x_k)` are constants. The error of this sum falls as :math:`e^{-2\pi\rho/h}`, and derivatives with
respect to μ and σ² act only on the Gaussian.

All functions have a symmetry, :math:`f(x) = 1 - f(-x)` for steps and :math:`f(x) = x + f(-x)` for ramps. Positive means
are mirrored, so that there is no cancellation far from zero.

Derivatives with respect to σ² are half the second derivatives with respect to μ (Price's theorem).

Status: exact up to rounding and the stated quadrature error (below 1e-8 in float64, 1e-4 in float32, for any σ).

Source: for the lattice, Trefethen & Weideman (2014), "The exponentially convergent trapezoidal rule".
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_dvi.core.elementwise import Elementwise, fuses
from pyro_dvi.core.recorder import assumed, is_recording
from pyro_dvi.moments.quadrature import DENSITY, Nodes, column, constants, distribution, gauss_hermite
from pyro_dvi.moments.smooth_kernel import smooth_kernel

_SERIES = (1e-6, 1e-3)  # variances in float64 and float32
_LANES = 64  # if it divides the number of columns, one thread rounds the sums over rows alike in all columns
Form = Callable[[Tensor], tuple[Tensor, Tensor]]


class _Nodes(NamedTuple):
    """Quadrature nodes for one kind of function, in float64 and in float32.

    Attributes:
        crossover: the standard deviation beyond which the lattice is used.
        order: the number of Gauss-Hermite nodes, sufficient up to the crossover.
        reach: half the length of the lattice.
        spacing: spacing of the lattice.
    """

    crossover: float
    order: tuple[int, int]
    reach: tuple[float, float]
    spacing: tuple[float, float]


_LOGISTIC = _Nodes(1.0, (28, 13), (28.0, 14.0), (0.55, 0.9))
_STEEP = _Nodes(0.8, (30, 14), (9.0, 7.0), (0.45, 0.65))


@dataclass(frozen=True, eq=False)
class Smooth:
    r"""A function that is 0 far to the left and 1 (a step) or x (a ramp) far to the right.

    Attributes:
        value_and_slope: f and its derivative.
        ramp: True if f(x) approaches x on the right; False if it approaches 1.
        in_cpp: C++ statements that compute ``f`` and its ``slope`` at ``x``.
        steep: True if f approaches its tails as fast as a Gaussian decays; False if it approaches them as fast as an
            exponential.
        smoothing: s, the width of the smoothed step or ramp.
        kernel: the method ``around``, with slopes, as one kernel on a GPU.
    """

    value_and_slope: Form
    ramp: bool
    in_cpp: str
    steep: bool = False
    smoothing: float = field(init=False)
    _tables: tuple["_Table", "_Table"] = field(init=False, repr=False)
    kernel: Elementwise = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "smoothing", 1.0 if self.steep else 1.7)
        object.__setattr__(self, "_tables", (_Table.of(self, 0), _Table.of(self, 1)))
        object.__setattr__(self, "kernel", smooth_kernel(self))

    def around(self, mu: Tensor, variance: Tensor, slopes: bool) -> list[Tensor]:
        """Return the mean minus f(μ), the variance, and the slopes of both."""
        if fuses(mu, variance):
            return list(self.kernel(mu, variance))[: 6 if slopes else 2]
        return self._around(mu, variance, slopes)

    def _around(self, mu: Tensor, variance: Tensor, slopes: bool) -> list[Tensor]:
        # Used as a factor, because torch.where is slow on CPU.
        side = torch.copysign(constants(1.0, mu), mu).neg_()
        block = _Block(mu * side, variance, side, slopes)
        table = self._tables[0 if mu.dtype is torch.float64 else 1]
        return self._mirrored_back(block, self._chosen(table, block))

    def _chosen(self, table: "_Table", block: "_Block") -> list[Tensor]:
        """If reading values is cheap, run the right quadrature on each element; otherwise run both on all elements.

        Both ways agree to the last bit, so that recorded and eager steps can be compared. Results differ by rounding
        only if several threads share a large block with both kinds of elements.
        """
        y, variance, limit = block.y, block.variance, table.limit
        if y.device.type != "cpu" or torch.compiler.is_compiling() or y.numel() == 0:
            return self._everywhere(table, block)
        low, high = variance.aminmax()
        if assumed(high <= limit):
            return self._near(table, block, not assumed(low >= table.series))
        if assumed(low > limit):
            return self._far(table, block)
        if is_recording() or len(y) % _LANES:
            return self._everywhere(table, block)
        wide = variance > limit
        parts = []
        for chosen, rule in ((wide, self._far), (wide.logical_not(), self._near)):
            index = chosen.nonzero().view(-1)
            padded = torch.nn.functional.pad(index, (0, -len(index) % _LANES))
            parts.append((index, torch.stack(rule(table, block.at(padded)))[:, : len(index)]))
        whole = y.new_empty(len(parts[0][1]), len(y))
        for index, values in parts:
            whole.index_copy_(1, index, values)
        return list(whole.unbind())

    def _everywhere(self, table: "_Table", block: "_Block") -> list[Tensor]:
        """Run both quadratures on all elements."""
        variance, limit = block.variance, table.limit
        near = self._near(table, block.with_variance(variance.clamp_max(limit)))
        far = self._far(table, block.with_variance(variance.clamp_min(limit)))
        return [torch.where(variance > limit, a, b) for a, b in zip(far, near, strict=True)]

    def _near(self, table: "_Table", block: "_Block", some_tiny: bool = True) -> list[Tensor]:
        """Return shift of the mean, variance and E f', then slopes and E f''', with Gauss-Hermite quadrature."""
        y, variance, _, slopes = block
        sigma = variance.sqrt()
        z, w = (constants(column, y) for column in table.nodes)
        d, slope = self.value_and_slope(torch.addcmul(y, sigma, z))
        d = d - self.value_and_slope(y)[0]
        weighted = d * w
        shift, spread = weighted.sum(0), (d * weighted).sum(0)
        spread.addcmul_(shift, shift, value=-1)
        powers = slope * w
        first, second = powers.sum(0), powers.mul_(z).sum(0)  # E f', E[f' z] = σ E f''
        third = powers.mul_(z).sum(0).sub_(first)  # σ² times the third derivative
        if slopes:  # E[d f'] and E[d f' z]
            by_mu = weighted.mul_(slope).sum(0).addcmul_(shift, first, value=-1).mul_(2)
            by_variance = weighted.mul_(z).sum(0).addcmul_(shift, second, value=-1).div_(sigma)
        if some_tiny:
            # If the differences d are close to rounding error, use E d = σ² E f'' / 2 and the first three terms of
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
        return [shift, spread, first, second.div_(sigma).mul_(0.5), by_mu, by_variance, third / variance]

    def _far(self, table: "_Table", block: "_Block") -> list[Tensor]:
        """The same terms as ``_near``, computed with the lattice and closed forms for the tails."""
        y, variance, _, slopes = block
        of_f, of_square = self._rest(table, block)
        _add_straight_ends(self, y, variance, of_f, of_square)
        f, f1, s = of_f[0], of_f[1], of_square[0]
        shift, spread = f - self.value_and_slope(y)[0], s.addcmul_(f, f, value=-1)
        if not slopes:
            return [shift, spread, f1]
        f2, f3, s1, s2 = *of_f[2:], *of_square[1:]
        by_mu, by_variance = s1.addcmul_(f, f1, value=-2), s2.mul_(0.5).addcmul_(f, f2, value=-1)
        return [shift, spread, f1, f2.mul_(0.5), by_mu, by_variance, f3]

    def _mirrored_back(self, block: "_Block", g: list[Tensor]) -> list[Tensor]:
        r"""Undo the mirroring of positive means.

        A step is :math:`1 - f(-x)`. A ramp is :math:`x + f(-x)`, with variance
        :math:`\mathrm{Var}\,f + \sigma^2 - 2\sigma^2\,\mathrm E[f']` by Stein's lemma.
        """
        variance, side = block.variance, block.side
        shift, spread, a, *rest = g
        if not self.ramp:
            shift = shift.mul_(side)
            if not rest:
                return [shift, spread]
            b, c, d, _ = rest
            return [shift, spread, a, b.mul_(side), c.mul_(side), d]
        right = torch.mul(side, -0.5).add_(0.5)  # 1 for means that were positive, else 0
        excess = torch.add(constants(1.0, a), a, alpha=-2).mul_(right)
        spread = spread.addcmul_(variance, excess)
        if not rest:
            return [shift, spread]
        b, c, d, third = rest
        variance = variance * right
        c = c.mul_(side).addcmul_(variance, b, value=4)
        d = d.add_(excess).addcmul_(variance, third, value=-1)
        return [shift, spread, a.add_(excess), b, c, d]

    def _rest(self, table: "_Table", block: "_Block") -> tuple[list[Tensor], list[Tensor]]:
        """Expected remainders of f (with three derivatives) and f² (with two); one derivative each without slopes."""
        y, variance, _, slopes = block
        inverse = variance.rsqrt()
        places, remainders = (constants(numbers, y) for numbers in table.lattice)
        u = torch.sub(places, y).mul_(inverse).clamp_(-table.reach, table.reach)
        density = torch.addcmul(inverse.log(), u, u, value=-0.5).exp_()
        terms = remainders * density
        u.mul_(inverse)  # multiplying by it takes a derivative in the mean, up to lower-order terms
        sums = [terms.sum(1), terms.mul_(u).sum(1)]
        if slopes:
            squared = inverse.square()
            sums.append(terms.mul_(u).sum(1).addcmul_(sums[0], squared, value=-1))
        (of_f, of_square) = (list(rows) for rows in zip(*(t.unbind() for t in sums), strict=True))
        if slopes:
            of_f.append((terms[0] * u).sum(0).addcmul_(of_f[1], squared, value=-3))
        return of_f, of_square


@dataclass(frozen=True, eq=False)
class Rescaled:
    """The function ``outer * f(inner * x) + constant`` for a smooth step or ramp f.

    Attributes:
        centre: the function itself, for its value at the mean.
        smooth: f.
        inner: factor of the argument.
        outer: factor of the value.
        one_kernel: True, because a GPU needs no memory for nodes.
    """

    centre: Callable[[Tensor], Tensor]
    smooth: Smooth
    inner: float = 1.0
    outer: float = 1.0
    one_kernel = True

    def __call__(self, mu: Tensor, variance: Tensor, slopes: bool) -> list[Tensor]:
        """Return mean and variance, and their slopes."""
        i, o = self.inner, self.outer
        if i == o == 1:
            shift, *rest = self.smooth.around(mu, variance, slopes)
            return [shift.add_(self.centre(mu)), *rest]
        shift, *rest = self.smooth.around(i * mu, i * i * variance, slopes)
        factors = (o * o, o * i, o * i * i, o * o * i, (o * i) ** 2)
        scaled = [factor * part for factor, part in zip(factors[: len(rest)], rest, strict=True)]
        return [torch.add(self.centre(mu), shift, alpha=o), *scaled]


def _add_straight_ends(
    function: Smooth, y: Tensor, variance: Tensor, of_f: list[Tensor], of_square: list[Tensor]
) -> None:
    r"""Add the expectations of q Φ(x/s) and q² Φ(x/s), and of as many derivatives in y as there are rows.

    With :math:`c = v + s^2`, :math:`z = y/\sqrt c` and :math:`p = \phi(z)/\sqrt c`, the expectation of x Φ(x/s) and its
    derivatives are

    .. math::
        y\Phi(z) + vp, \qquad \Phi(z) + \tfrac{s^2}{c}yp, \qquad
        bp, \qquad -\tfrac{z}{\sqrt c}\bigl(b + \tfrac{2s^2}{c}\bigr)p, \qquad b = 1 + \tfrac{s^2}{c}(1 - z^2),

    and the expectation of x² Φ(x/s) follows from :math:`\mathrm E[x h(x)] = yH + vH'`, with
    :math:`H(y) = \mathrm E[h(x)]`.
    """
    inverse = (variance + function.smoothing**2).rsqrt_()
    z = y * inverse
    zz = z * z
    p0 = distribution(z)
    p1 = (zz * -0.5).exp_().mul_(inverse).mul_(DENSITY)
    steep = z.mul_(inverse).neg_()
    if not function.ramp:
        p = [p0, p1, steep * p1, (zz - 1).mul_(p1).mul_(inverse.square())]
        for rows in (of_f, of_square):
            for row, term in zip(rows, p[: len(rows)], strict=True):
                row.add_(term)
        return
    share = inverse.square().mul_(function.smoothing**2)
    b = torch.addcmul(1 + share, share, zz, value=-1)
    g1 = torch.addcmul(p0, share * y, p1)
    g = [(y * p0).addcmul_(variance, p1), g1, b * p1, b.add_(share, alpha=2).mul_(steep).mul_(p1)]
    for k, row in enumerate(of_square):
        row.addcmul_(y, g[k]).addcmul_(variance, g[k + 1])
        if k:
            row.add_(g[k - 1], alpha=k)
    for row, term in zip(of_f, g[: len(of_f)], strict=True):
        row.add_(term)


class _Block(NamedTuple):
    """Elements whose positive means are mirrored; the side is -1 for mirrored elements."""

    y: Tensor
    variance: Tensor
    side: Tensor
    slopes: bool

    def at(self, index: Tensor) -> "_Block":
        """Return some of the elements."""
        y, variance, side = (t.index_select(0, index) for t in self[:3])
        return _Block(y, variance, side, self.slopes)

    def with_variance(self, variance: Tensor) -> "_Block":
        """Return the same means with other variances; ``_replace`` cannot be compiled with torch 2.8."""
        return _Block(self.y, variance, self.side, self.slopes)


class _Table(NamedTuple):
    """The constants of a function in one precision: Python floats, which work on every device and in compiled code.

    Attributes:
        series: the variance below which differences from f(μ) are lost to rounding.
        reach: standard deviations beyond which a density is set to zero, because denormal numbers are slow.
        limit: the variance beyond which the lattice is used.
        nodes: nodes and weights of Gauss-Hermite, as columns.
        lattice: the lattice points, and the remainders of f and f² at these points, multiplied by the spacing and the
            Gaussian constant; all as columns.
    """

    series: float
    reach: float
    limit: float
    nodes: Nodes
    lattice: tuple[Any, Any]

    @classmethod
    def of(cls, function: Smooth, precision: int) -> "_Table":
        nodes = _STEEP if function.steep else _LOGISTIC
        hermite = gauss_hermite(nodes.order[precision])
        spacing = nodes.spacing[precision]
        count = math.ceil(nodes.reach[precision] / spacing)
        x = torch.arange(-count, count + 1, dtype=torch.float64, device="cpu") * spacing
        step = torch.special.ndtr(x / function.smoothing)
        end = x if function.ramp else torch.ones_like(x)

        f = function.value_and_slope(x)[0]
        rows = tuple(column(spacing * DENSITY * (f**p - end**p * step)) for p in (1, 2))
        return cls(
            _SERIES[precision], (36.0, 11.0)[precision], nodes.crossover**2, hermite, (column(x), rows)
        )
