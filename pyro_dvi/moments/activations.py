# SPDX-License-Identifier: Apache-2.0
r"""Activations that bend smoothly, exponentials and waves.

**Sine and cosine** have

.. math::
    \mathrm E[\sin x] = e^{-\sigma^2/2}\sin\mu, \qquad
    \mathrm{Var}[\sin x] = \tfrac12(1 - e^{-\sigma^2})\bigl((1 - e^{-\sigma^2}) + 2e^{-\sigma^2}\cos^2\mu\bigr),

and the same with sine and cosine exchanged: sums of terms that are not negative, so that no digits cancel.

**Steps and ramps** (sigmoid, tanh, erf, softplus, SiLU, GELU) share the fast rule of :mod:`pyro_dvi.moments.smooth`;
ELU, mish and softsign share the quadrature of :class:`~pyro_dvi.moments.quadrature.BothSides`, which costs several
times as much as a sigmoid. Both are exact to 1e-8 (float64) and 1e-4 (float32).
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
    BothSides,
    distribution,
    elementwise_rule,
    through,
)
from pyro_dvi.moments.rules import moment_rule
from pyro_dvi.moments.smooth import Rescaled, Smooth
from pyro_dvi.moments.value import GaussianMoments

# Steps and ramps ----------------------------------------------------------------------------------------------

_CUBIC = 0.044715  # of GELU's approximation by tanh
_RATE = 2 * math.sqrt(2 / math.pi)


def _sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(x)
    return s, s - s * s


def _softplus(x: Tensor) -> tuple[Tensor, Tensor]:
    # Nowhere far on the right, where the exponential would overflow: those means are mirrored.
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


def _gelu(x: Tensor) -> tuple[Tensor, Tensor]:
    p, density = _normal(x)
    return x * p, density.mul_(x).add_(p)


_STEP, _NORMAL_STEP = Smooth(_sigmoid, ramp=False), Smooth(_normal, ramp=False, steep=True)
_RAMP = Smooth(_softplus, ramp=True)

sigmoid = elementwise_rule(Rescaled(torch.sigmoid, _STEP), F.sigmoid, torch.sigmoid, torch.special.expit)
elementwise_rule(Rescaled(torch.tanh, _STEP, inner=2.0, outer=2.0), F.tanh, torch.tanh)
elementwise_rule(
    Rescaled(torch.erf, _NORMAL_STEP, inner=math.sqrt(2), outer=2.0), torch.erf, torch.special.erf
)
elementwise_rule(Rescaled(F.logsigmoid, _RAMP, inner=-1.0, outer=-1.0), F.logsigmoid)
elementwise_rule(Rescaled(F.silu, Smooth(_silu, ramp=True)), F.silu)

_SOFTPLUS = Rescaled(F.softplus, _RAMP)
_GELU = Rescaled(lambda x: x * distribution(x), Smooth(_gelu, ramp=True, steep=True))
_GELU_TANH = Rescaled(partial(F.gelu, approximate="tanh"), Smooth(_gelu_tanh, ramp=True, steep=True))


@moment_rule(F.softplus, kind=Kind.ELEMENTWISE)
def softplus(input: GaussianMoments, beta: float = 1, threshold: float = 20) -> GaussianMoments:
    r"""Moments of :math:`\log(1 + e^{\beta x}) / \beta`.

    Torch replaces the function by x where :math:`\beta x` exceeds the threshold; the rule does not, a difference of
    :math:`e^{-\mathrm{threshold}}/\beta` at most.

    Example:
        >>> softplus(GaussianMoments(torch.zeros(1), torch.ones(1))).loc
        tensor([0.8061])
    """
    if beta == 1:
        return through(_SOFTPLUS, input)
    centre = partial(F.softplus, beta=beta, threshold=threshold)
    return through(Rescaled(centre, _RAMP, inner=float(beta), outer=1 / beta), input)


@moment_rule(F.gelu, kind=Kind.ELEMENTWISE)
def gelu(input: GaussianMoments, *, approximate: str = "none") -> GaussianMoments:
    r"""Moments of :math:`x\,\Phi(x)`, or of its approximation by tanh.

    Example:
        >>> gelu(GaussianMoments(torch.zeros(1), torch.ones(1))).loc
        tensor([0.2821])
    """
    return through(_GELU_TANH if approximate == "tanh" else _GELU, input)


@moment_rule(F.glu)
def glu(input: GaussianMoments, dim: int = -1) -> GaussianMoments:
    r"""Moments of :math:`a\,\mathrm{sigmoid}(b)` for the halves a and b along a dimension.

    Status: exact for independent elements, as exact as :func:`sigmoid`.

    Example:
        >>> glu(GaussianMoments(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0])))
        GaussianMoments(loc=tensor([1.]), variance=tensor([0.2500]))
    """
    if input.shape[dim] % 2:
        raise ValueError(f"F.glu halves a dimension of even size, got {tuple(input.shape)} and dim={dim}")
    halves = zip(torch.chunk(input.loc, 2, dim), torch.chunk(input.variance, 2, dim), strict=True)
    values, gates = (GaussianMoments(loc, variance) for loc, variance in halves)
    return mul(values, sigmoid(gates))


# Quadrature on either side of zero ------------------------------------------------------------------------------


def _softsign_difference(x: Tensor, mu: Tensor, delta: Tensor) -> Tensor:
    size, size_of_mean = x.abs(), mu.abs()
    across = x * size_of_mean - mu * size  # exactly zero where x and μ have the same sign
    return (delta + across) / ((1 + size) * (1 + size_of_mean))


def _mish_difference(x: Tensor, mu: Tensor, delta: Tensor) -> Tensor:
    # mish(x) = x (1 - 2/n), n = (1 + e^x)² + 1; beyond 20 it is x to rounding.
    e, at_mean = torch.exp(x.clamp_max(20.0)), torch.exp(mu.clamp_max(20.0))
    rise = torch.maximum(e, at_mean) * torch.copysign(torch.expm1(-delta.abs()), delta)  # of e^x
    n, n_at_mean = (1 + e).square() + 1, (1 + at_mean).square() + 1
    return delta * (e * (e + 2) / n) + 2 * mu * rise * (e + at_mean + 2) / n / n_at_mean


def _elu_difference(x: Tensor, mu: Tensor, delta: Tensor, alpha: float) -> Tensor:
    # The distance from μ to x is split at zero: α(e^x - 1) to the left, x to the right.
    left = torch.minimum(delta, -mu) - (-mu).clamp_max(0)
    right = torch.maximum(delta, -mu) - (-mu).clamp_min(0)
    highest = torch.exp(torch.maximum(x, mu).clamp_max(0))
    return right + alpha * highest * torch.copysign(torch.expm1(-left.abs()), left)


elementwise_rule(BothSides(F.mish, _mish_difference, width=8.0), F.mish)
elementwise_rule(BothSides(F.softsign, _softsign_difference), F.softsign)


@moment_rule(F.elu, kind=Kind.ELEMENTWISE)
def elu(input: GaussianMoments, alpha: float = 1.0) -> GaussianMoments:
    r"""Moments of x where it is positive, and :math:`\alpha(e^x - 1)` elsewhere.

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
    """Moments of the cosine. Status: exact, as :func:`sin`."""
    return _wave(torch.cos(input.loc), torch.sin(input.loc), input.variance)


def _wave(value: Tensor, other: Tensor, variance: Tensor) -> GaussianMoments:
    lost = -torch.expm1(-variance)
    return GaussianMoments(
        value * torch.exp(-0.5 * variance), 0.5 * lost * (lost + 2 * torch.exp(-variance) * other.square())
    )
