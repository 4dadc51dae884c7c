# SPDX-License-Identifier: Apache-2.0
r"""Functions that are a polynomial of degree two at most between breakpoints, in closed form.

With :math:`x = \mu + \sigma z`, each piece is a polynomial in z, and needs truncated moments of the standard Gaussian

.. math:: T_k = \int_a^b z^k \phi(z)\,dz, \qquad T_k = (k-1)\,T_{k-2} + a^{k-1}\phi(a) - b^{k-1}\phi(b).

Polynomials are written around f(μ): with :math:`d = f(x) - f(\mu)`,

.. math:: m = f(\mu) + \mathrm E[d], \qquad v = \mathrm E[d^2] - \mathrm E[d]^2.

Slopes come from the score of the Gaussian, so that functions with jumps are served as well.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments.dispatch import Kind
from pyro_dvi.moments.quadrature import DENSITY, ROOT_HALF, from_scores, through
from pyro_dvi.moments.rectifiers import relu
from pyro_dvi.moments.rules import moment_rule
from pyro_dvi.moments.value import GaussianMoments


class Piece(NamedTuple):
    """The polynomial ``constant + slope * x + square * x**2``."""

    constant: float = 0.0
    slope: float = 0.0
    square: float = 0.0


@dataclass(frozen=True)
class Piecewise:
    """One piece to the left of each breakpoint, and one to the right of the last.

    Attributes:
        breaks: in increasing order.
        pieces: one more than breaks.
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
            # The piece minus f(μ), as the sum of the changes between them: exactly zero where they are the same.
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
        """Return what the piece after break k has more than the one before, without a difference of large numbers."""
        c, before, after = self.breaks[k], self.pieces[k], self.pieces[k + 1]
        square = after.square - before.square
        slope = after.slope - before.slope + 2 * square * c
        jump = after.constant - before.constant + (after.slope - before.slope) * c + square * c * c
        u = x - c
        return u * (u * square + slope) + (jump if abs(jump) > 1e-12 else 0.0)


class Cut(NamedTuple):
    """A breakpoint in units of σ from the mean, the density there and the mass on either side."""

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
    """Coefficients of a piece in z, the constant one given."""
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
    """Return the moments from 0 to the highest between two breakpoints, None for infinity."""
    if below is None and above is None:
        raise ValueError("a piecewise function has a breakpoint")
    if above is None:
        mass = below.above  # type: ignore[union-attr]
    elif below is None:
        mass = above.below
    else:  # the difference of the smaller tails
        mass = torch.where(below.z > 0, below.above - above.above, above.below - below.below)
    moments = [mass]
    edges = [0.0 if c is None else c.density for c in (below, above)]
    for k in range(1, highest + 1):
        boundary = edges[0] - edges[1]
        moments.append(boundary + (k - 1) * moments[k - 2] if k > 1 else boundary)
        edges = [0.0 if c is None else e * c.z for e, c in zip(edges, (below, above), strict=True)]
    return moments


_IDENTITY = Piece(slope=1.0)
_HARDSIGMOID = Piecewise((-3.0, 3.0), (Piece(), Piece(0.5, 1 / 6), Piece(1.0)), F.hardsigmoid)
_HARDSWISH = Piecewise((-3.0, 3.0), (Piece(), Piece(0.0, 0.5, 1 / 6), _IDENTITY), F.hardswish)


def _clipped(x: GaussianMoments, low: float, high: float) -> GaussianMoments:
    if low >= high:
        return GaussianMoments(torch.full_like(x.loc, high), torch.zeros_like(x.loc))
    if low == 0 and high == math.inf:
        return relu(x)
    breaks, pieces = [], [_IDENTITY]
    if low > -math.inf:
        breaks, pieces = [low], [Piece(low), _IDENTITY]
    if high < math.inf:
        breaks, pieces = [*breaks, high], [*pieces, Piece(high)]
    return (
        through(Piecewise(tuple(breaks), tuple(pieces), partial(torch.clamp, min=low, max=high)), x)
        if breaks
        else x
    )


def _bound(value: Any, default: float) -> float:
    if value is None:
        return default
    if isinstance(value, Tensor | GaussianMoments):
        raise UnsupportedError(
            "clamp of moments takes numbers as bounds, not tensors: write x.clamp(low, high) with floats"
        )
    return float(value)


@moment_rule(F.relu6, kind=Kind.ELEMENTWISE)
def relu6(input: GaussianMoments) -> GaussianMoments:
    """Moments of x cut off below 0 and above 6.

    Status: exact for Gaussian x, as all rules of this file.
    """
    return _clipped(input, 0.0, 6.0)


@moment_rule(F.hardtanh, kind=Kind.ELEMENTWISE)
def hardtanh(input: GaussianMoments, min_val: float = -1.0, max_val: float = 1.0) -> GaussianMoments:
    """Moments of x cut off at two bounds. Status: exact.

    Example:
        >>> hardtanh(GaussianMoments(torch.zeros(1), torch.ones(1))).variance
        tensor([0.5161])
    """
    return _clipped(input, float(min_val), float(max_val))


@moment_rule(torch.clamp, torch.clip, torch.clamp_min, kind=Kind.ELEMENTWISE)
def clamp(input: GaussianMoments, min: Any = None, max: Any = None) -> GaussianMoments:
    """Moments of x cut off at bounds that are numbers. Status: exact.

    Raises:
        UnsupportedError: a bound is a tensor.
    """
    return _clipped(input, _bound(min, -math.inf), _bound(max, math.inf))


@moment_rule(torch.clamp_max, kind=Kind.ELEMENTWISE)
def clamp_max(input: GaussianMoments, max: Any) -> GaussianMoments:
    """Moments of x cut off above. Status: exact."""
    return clamp(input, max=max)


@moment_rule(F.threshold, torch.threshold, kind=Kind.ELEMENTWISE)
def threshold(input: GaussianMoments, threshold: float, value: float) -> GaussianMoments:
    """Moments of x where it exceeds the threshold, and ``value`` elsewhere. Status: exact."""
    function = partial(F.threshold, threshold=threshold, value=value)
    return through(Piecewise((float(threshold),), (Piece(float(value)), _IDENTITY), function), input)


@moment_rule(F.hardsigmoid, kind=Kind.ELEMENTWISE)
def hardsigmoid(input: GaussianMoments) -> GaussianMoments:
    """Moments of x/6 + 1/2 cut off at 0 and 1. Status: exact."""
    return through(_HARDSIGMOID, input)


@moment_rule(F.hardswish, kind=Kind.ELEMENTWISE)
def hardswish(input: GaussianMoments) -> GaussianMoments:
    """Moments of x times hardsigmoid(x). Status: exact."""
    return through(_HARDSWISH, input)


@moment_rule(torch.hardshrink, kind=Kind.ELEMENTWISE)
def hardshrink(input: GaussianMoments, lambd: float = 0.5) -> GaussianMoments:
    """Moments of x where abs(x) exceeds lambd, and 0 elsewhere. Status: exact."""
    at = float(lambd)
    pieces = (_IDENTITY, Piece(), _IDENTITY)
    return through(Piecewise((-at, at), pieces, partial(torch.hardshrink, lambd=at)), input)


@moment_rule(F.softshrink, kind=Kind.ELEMENTWISE)
def softshrink(input: GaussianMoments, lambd: float = 0.5) -> GaussianMoments:
    """Moments of x moved towards 0 by lambd, at most to 0. Status: exact."""
    at = float(lambd)
    pieces = (Piece(at, 1.0), Piece(), Piece(-at, 1.0))
    return through(Piecewise((-at, at), pieces, partial(F.softshrink, lambd=at)), input)
