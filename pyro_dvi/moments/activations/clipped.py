# SPDX-License-Identifier: Apache-2.0
"""Functions with corners: clipped, shrunk and leaky ones."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments.activations.elementwise import through
from pyro_dvi.moments.activations.piecewise import Piece, Piecewise
from pyro_dvi.moments.activations.rectified import Leaky, relu
from pyro_dvi.moments.dispatch import Kind
from pyro_dvi.moments.rules import moment_rule
from pyro_dvi.moments.value import GaussianMoments, loc_of, second_moment_of, variance_of

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
    return through(Piecewise(tuple(breaks), tuple(pieces)), x) if breaks else x


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

    Status: exact for Gaussian x, as all rules of this file (:mod:`pyro_dvi.moments.activations.piecewise`).
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
    return through(Piecewise((float(threshold),), (Piece(float(value)), _IDENTITY)), input)


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
    return through(Piecewise((-at, at), (_IDENTITY, Piece(), _IDENTITY)), input)


@moment_rule(F.softshrink, kind=Kind.ELEMENTWISE)
def softshrink(input: GaussianMoments, lambd: float = 0.5) -> GaussianMoments:
    """Moments of x moved towards 0 by lambd, at most to 0. Status: exact."""
    at = float(lambd)
    return through(Piecewise((-at, at), (Piece(at, 1.0), Piece(), Piece(-at, 1.0))), input)


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
