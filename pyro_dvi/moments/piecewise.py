# SPDX-License-Identifier: Apache-2.0
r"""Moments of ReLU, its leaky variants and other piecewise polynomials, in closed form with exact derivatives.

With :math:`\alpha = \mu/\sigma`, ReLU has

.. math::
    m = \mu\Phi(\alpha) + \sigma\phi(\alpha), \qquad v = \sigma^2\Phi(\alpha) + m(\mu - m),

    \frac{\partial m}{\partial\mu} = \Phi, \quad
    \frac{\partial m}{\partial\sigma^2} = \frac{\phi}{2\sigma}, \quad
    \frac{\partial v}{\partial\mu} = 2m(1 - \Phi), \quad
    \frac{\partial v}{\partial\sigma^2} = \Phi - \frac{m\phi}{\sigma}.

Functions with several kinks (:class:`Piecewise`) are polynomials of degree at most two between breakpoints. With
:math:`x = \mu + \sigma z`, each piece is a polynomial in z, and needs truncated moments of the standard Gaussian

.. math:: T_k = \int_a^b z^k \phi(z)\,dz, \qquad T_k = (k-1)\,T_{k-2} + a^{k-1}\phi(a) - b^{k-1}\phi(b).

Moments are computed from differences :math:`d = f(x) - f(\mu)`,

.. math:: m = f(\mu) + \mathrm E[d], \qquad v = \mathrm E[d^2] - \mathrm E[d]^2.

Status: exact for Gaussian x, with exact derivatives.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pyro_dvi.core.elementwise import Elementwise
from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments.dispatch import Kind
from pyro_dvi.moments.quadrature import DENSITY, ROOT_HALF, constants, elementwise_rule, from_scores, through
from pyro_dvi.moments.rules import moment_rule
from pyro_dvi.moments.value import GaussianMoments, raised, tiny_variance

_FAR = 8.0  # in the argument of erfc: 11.3 standard deviations, a probability of 1e-29
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
    return GaussianMoments(*_RECTIFY(input.loc, raised(input.variance)))


@dataclass(frozen=True)
class Leaky:
    r"""The function :math:`ax + (1-a)x_+`; its moments are computed from the moments m and v of ReLU.

    .. math::
        \mathrm E = a\mu + (1-a)\,m, \qquad \mathrm{Var} = a^2\sigma^2 + (1-a)^2\,v + 2a(1-a)\,\sigma^2\Phi(\alpha).

    Attributes:
        negative_slope: a.
    """

    negative_slope: float

    def __call__(self, mu: Tensor, variance: Tensor, slopes: bool) -> list[Tensor]:
        """Return mean and variance, and their slopes."""
        a, b = self.negative_slope, 1 - self.negative_slope
        m, p, density, v = _rectified(mu, variance)
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
    r"""Return m, Φ(α), φ(α)/σ and v in few passes over memory, mostly in place.

    Activations are larger than any cache, and allocating memory costs more than the arithmetic.
    """
    inverse = variance.clamp_min(tiny_variance(variance.dtype)).rsqrt_()
    # Beyond 11 standard deviations from the kink, the clamp changes only denormal numbers, which are slow.
    z = torch.addcmul(constants(0.0, mu), mu, inverse, value=-ROOT_HALF).clamp_(-_FAR, _FAR)
    p = torch.special.erfc(z).mul_(0.5)  # with erfc: 1 + erf cancels in the left tail
    slope = torch.addcmul(constants(_LOG_DENSITY, mu), z, z, value=-1, out=z).exp_().mul_(inverse)
    mean = torch.mul(variance, slope, out=inverse).addcmul_(mu, p).clamp_min_(0)
    return mean, p, slope, torch.sub(mu, mean).mul_(mean).addcmul_(variance, p).clamp_min_(0)


class _Rectifier(Function):
    """ReLU as one autograd node. It saves two tensors besides its mean, which the next function saves anyway."""

    @staticmethod
    def forward(ctx: Any, mu: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        # The floor is used only in the slopes, so the derivative needs no mask.
        mean, p, slope, spread = _rectified(mu, variance)
        ctx.save_for_backward(mean, p, slope)
        return mean, spread

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_mean: Tensor, g_spread: Tensor) -> tuple[Tensor, Tensor]:
        return _gradients(g_mean, g_spread, *ctx.saved_tensors)


def _gradients(
    g_mean: Tensor, g_spread: Tensor, mean: Tensor, p: Tensor, slope: Tensor
) -> tuple[Tensor, Tensor]:
    zero = constants(0.0, mean)
    # With a single rounding, because the terms cancel far to the right.
    product = torch.addcmul(zero, g_spread, mean, value=2)
    rest = torch.sub(g_mean, product)
    g_mu = product.addcmul_(rest, p)
    return g_mu, torch.addcmul(zero, rest, slope, value=0.5, out=rest).addcmul_(g_spread, p)


# On a GPU, the backward pass computes all terms anew from the input, because memory is slower than arithmetic there.
_TERMS = f"""
    T tiny = sizeof(T) == 8 ? T({tiny_variance(torch.float64)}) : T({tiny_variance(torch.float32)});
    T inverse = rsqrt(variance < tiny ? tiny : variance);
    T z = mu * inverse * T({ROOT_HALF}), far = z < 0 ? -z : z;
    far = far > {_FAR} ? T({_FAR}) : far;
    T tail = T(0.5) * erfc(far), slope = exp(T({_LOG_DENSITY}) - far * far) * inverse;
    T p = z < 0 ? tail : 1 - tail, q = z < 0 ? 1 - tail : tail;
    T m = variance * slope + mu * p;
    m = m < 0 ? T(0) : m;
"""
_RECTIFY = Elementwise(
    "rectify",
    "mean, spread",
    f"{_TERMS} mean = m; m = (mu - m) * m + variance * p; spread = m < 0 ? T(0) : m;",
    lambda mu, variance: _Rectifier.apply(mu, variance),
    Elementwise(
        "rectify_backward",
        "g_mu, g_v",
        f"{_TERMS} g_mu = g_mean * p + 2 * g_spread * m * q;"
        "g_v = T(0.5) * (g_mean - 2 * g_spread * m) * slope + g_spread * p;",
        lambda g_mean, g_spread, mu, variance: _gradients(g_mean, g_spread, *_rectified(mu, variance)[:3]),
    ),
)


elementwise_rule(Leaky(-1.0), torch.abs, torch.absolute)


@moment_rule(F.leaky_relu, kind=Kind.ELEMENTWISE)
def leaky_relu(input: GaussianMoments, negative_slope: float = 0.01) -> GaussianMoments:
    """Moments of leaky ReLU, which is x for positive x and a multiple of x otherwise. Status: exact for Gaussian x.

    Example:
        >>> leaky_relu(GaussianMoments(torch.zeros(1), torch.ones(1)), 0.1).loc
        tensor([0.3590])
    """
    return through(Leaky(float(negative_slope)), input)


# Several kinks ----------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """The polynomial ``constant + slope * x + square * x**2``."""

    constant: float = 0.0
    slope: float = 0.0
    square: float = 0.0


@dataclass(frozen=True)
class Piecewise:
    """A piecewise polynomial, with one piece to the left of each breakpoint and one to the right of the last.

    Attributes:
        breaks: breakpoints, in increasing order.
        pieces: the polynomials, one more than there are breakpoints.
        function: the function itself, for its value at the mean.
    """

    breaks: tuple[float, ...]
    pieces: tuple[Piece, ...]
    function: Callable[[Tensor], Tensor]

    def __call__(self, mu: Tensor, variance: Tensor, slopes: bool) -> list[Tensor]:
        """Return mean and variance, and their slopes."""
        sigma = variance.sqrt()
        cuts = [Cut.at((c - mu) / sigma) for c in self.breaks]
        right = [mu > c for c in self.breaks]
        changes = [self._change(k, mu) for k in range(len(self.breaks))]
        centre = self.function(mu)
        first: list[Any] = [0.0] * 3  # E[d z^k]
        second: list[Any] = [0.0] * 3  # E[d² z^k]
        for j, (below, above) in enumerate(zip([None, *cuts], [*cuts, None], strict=True)):
            # The piece minus f(μ), as a sum of changes between pieces: exactly zero for equal pieces.
            start: Any = sum(
                torch.where(r, 0.0 if k < j else -change, change if k < j else 0.0)
                for k, (r, change) in enumerate(zip(right, changes, strict=True))
            )
            q = _in_z(self.pieces[j], mu, sigma, start)
            moments = truncated(below, above, 2 * len(q) if slopes else 2 * len(q) - 2)
            squared = _product(q, q)
            for k in range(3 if slopes else 1):
                first[k] = first[k] + sum(c * moments[i + k] for i, c in enumerate(q))
                second[k] = second[k] + sum(c * moments[i + k] for i, c in enumerate(squared))
        return from_scores(centre, sigma, variance, first, second, slopes)

    def _change(self, k: int, x: Tensor) -> Tensor:
        """Return the piece after break k minus the piece before it, without cancellation."""
        c, before, after = self.breaks[k], self.pieces[k], self.pieces[k + 1]
        square = after.square - before.square
        slope = after.slope - before.slope + 2 * square * c
        jump = after.constant - before.constant + (after.slope - before.slope) * c + square * c * c
        u = x - c
        return u * (u * square + slope) + (jump if abs(jump) > 1e-12 else 0.0)


class Cut(NamedTuple):
    """A breakpoint in units of σ from the mean, the density there and the probability on either side."""

    z: Tensor
    density: Tensor
    below: Tensor
    above: Tensor

    @classmethod
    def at(cls, z: Tensor) -> "Cut":
        """Return the breakpoint at z."""
        z = z.clamp(-1e4, 1e4)  # so that z^k φ(z) is 0, not inf times 0
        scaled = z * ROOT_HALF
        below, above = torch.special.erfc(-scaled).mul_(0.5), torch.special.erfc(scaled).mul_(0.5)
        return cls(z, torch.exp(-scaled * scaled) * DENSITY, below, above)


def _in_z(piece: Piece, mu: Tensor, sigma: Tensor, start: Tensor) -> list[Tensor]:
    """Return the coefficients of a piece as a polynomial in z, whose constant coefficient is given."""
    q = [start]
    if piece.slope or piece.square:
        q.append(sigma * (2 * piece.square * mu + piece.slope))
    if piece.square:
        q.append(piece.square * sigma * sigma)
    return q


def _product(p: Sequence[Tensor], q: Sequence[Tensor]) -> list[Tensor]:
    result: list[Tensor] = []
    for k in range(len(p) + len(q) - 1):
        terms = [p[i] * q[k - i] for i in range(len(p)) if 0 <= k - i < len(q)]
        result.append(sum(terms[1:], terms[0]))
    return result


def truncated(below: Cut | None, above: Cut | None, highest: int) -> list[Tensor]:
    """Return the truncated moments up to order ``highest`` between two breakpoints; None is infinity."""
    if above is None:
        mass = below.above  # type: ignore[union-attr]
    elif below is None:
        mass = above.below
    else:  # difference of the smaller tails
        mass = torch.where(below.z > 0, below.above - above.above, above.below - below.below)
    moments = [mass]
    edges = [0.0 if c is None else c.density for c in (below, above)]
    for k in range(1, highest + 1):
        boundary = edges[0] - edges[1]
        moments.append(boundary + (k - 1) * moments[k - 2] if k > 1 else boundary)
        edges = [0.0 if c is None else e * c.z for e, c in zip(edges, (below, above), strict=True)]
    return moments


_IDENTITY = Piece(slope=1.0)
elementwise_rule(
    Piecewise((-3.0, 3.0), (Piece(), Piece(0.5, 1 / 6), Piece(1.0)), F.hardsigmoid), F.hardsigmoid
)
elementwise_rule(
    Piecewise((-3.0, 3.0), (Piece(), Piece(0.0, 0.5, 1 / 6), _IDENTITY), F.hardswish), F.hardswish
)


@moment_rule(torch.clamp, torch.clip, torch.clamp_min, kind=Kind.ELEMENTWISE)
def clamp(input: GaussianMoments, min: Any = None, max: Any = None) -> GaussianMoments:
    """Moments of x clamped to scalar bounds.

    Raises:
        UnsupportedError: if a bound is a tensor.
    """
    if any(isinstance(bound, Tensor | GaussianMoments) for bound in (min, max)):
        raise UnsupportedError(
            "the bounds of a clamp of moments must be numbers, not tensors: write x.clamp(low, high) with floats"
        )
    if min == 0 and max is None:
        return relu(input)
    breaks, pieces = [], [_IDENTITY]
    if min is not None:
        breaks, pieces = [float(min)], [Piece(float(min)), _IDENTITY]
    if max is not None:
        breaks, pieces = [*breaks, float(max)], [*pieces, Piece(float(max))]
    function = partial(torch.clamp, min=min, max=max)
    return through(Piecewise(tuple(breaks), tuple(pieces), function), input)


@moment_rule(torch.clamp_max, kind=Kind.ELEMENTWISE)
def clamp_max(input: GaussianMoments, max: Any) -> GaussianMoments:
    """Moments of x clamped from above."""
    return clamp(input, max=max)


@moment_rule(F.hardtanh, kind=Kind.ELEMENTWISE)
def hardtanh(input: GaussianMoments, min_val: float = -1.0, max_val: float = 1.0) -> GaussianMoments:
    """Moments of x clamped to two bounds.

    Example:
        >>> hardtanh(GaussianMoments(torch.zeros(1), torch.ones(1))).variance
        tensor([0.5161])
    """
    return clamp(input, min_val, max_val)


@moment_rule(F.relu6, kind=Kind.ELEMENTWISE)
def relu6(input: GaussianMoments) -> GaussianMoments:
    """Moments of x clamped to the range from 0 to 6."""
    return clamp(input, 0.0, 6.0)
