# SPDX-License-Identifier: Apache-2.0
"""Smooth steps and ramps: sigmoid, tanh, erf, softplus, SiLU, GELU, mish, and what is gated by a sigmoid."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.moments.activations.elementwise import through
from pyro_dvi.moments.activations.normal import moments_of_erf, moments_of_gelu
from pyro_dvi.moments.activations.smooth import Rescaled, Smooth
from pyro_dvi.moments.arithmetic import mul
from pyro_dvi.moments.dispatch import Kind
from pyro_dvi.moments.rules import moment_rule
from pyro_dvi.moments.value import GaussianMoments

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


def _mish(x: Tensor) -> tuple[Tensor, Tensor]:
    e = torch.exp(x.clamp_max(20.0))  # beyond which mish(x) = x to rounding
    n = e * (e + 2)
    tanh = n / (n + 2)  # of softplus(x)
    return x * tanh, torch.addcmul(tanh, x, 4 * e * (e + 1) / (n + 2) ** 2)


def _mirrored_mish(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``x + mish(-x)``, small on the left without a difference, and its slope."""
    e = torch.exp((-x).clamp_max(20.0))
    inverse = 1 / (e * (e + 2) + 2)
    rest = 2 * inverse  # 1 - tanh(softplus(-x))
    return x * rest, torch.addcmul(rest, x, 4 * e * (e + 1) * inverse * inverse)


SIGMOID = Smooth(_sigmoid, ramp=False, smoothing=1.7)
SOFTPLUS = Smooth(
    _softplus,
    ramp=True,
    smoothing=1.7,
    levels=(((0.3, 12), (1.0, 24)), ((0.6, 6), (1.0, 9))),
    reach=(28.0, 12.0),
)
SILU = Smooth(
    _silu,
    ramp=True,
    smoothing=1.7,
    reach=(28.0, 14.0),
    levels=(((0.3, 14), (1.0, 28)), ((0.5, 8), (1.0, 13))),
)
GELU_TANH = Smooth(
    _gelu_tanh,
    ramp=True,
    smoothing=1.0,
    levels=(((0.25, 14), (0.8, 28)), ((0.4, 8), (0.8, 14))),
    reach=(9.0, 7.0),
    spacing=(0.45, 0.65),
)
MISH = Smooth(
    _mish,
    ramp=True,
    smoothing=1.2,
    mirror=_mirrored_mish,
    levels=(((0.25, 14), (0.9, 32)), ((0.45, 8), (0.9, 14))),
    reach=(28.0, 14.0),
    spacing=(0.5, 0.75),
)


_SIGMOID = Rescaled(torch.sigmoid, SIGMOID)
_TANH = Rescaled(torch.tanh, SIGMOID, inner=2.0, outer=2.0)
_SOFTPLUS = Rescaled(F.softplus, SOFTPLUS)
_LOGSIGMOID = Rescaled(F.logsigmoid, SOFTPLUS, inner=-1.0, outer=-1.0)
_SILU = Rescaled(F.silu, SILU)
_GELU_TANH = Rescaled(partial(F.gelu, approximate="tanh"), GELU_TANH)
_MISH = Rescaled(F.mish, MISH)


@moment_rule(F.sigmoid, torch.sigmoid, torch.special.expit, kind=Kind.ELEMENTWISE)
def sigmoid(input: GaussianMoments) -> GaussianMoments:
    """Moments of the logistic function.

    Status: exact to 1e-8 (float64), 1e-4 (float32): :mod:`pyro_dvi.moments.activations.smooth`.

    Example:
        >>> sigmoid(GaussianMoments(torch.zeros(1), torch.ones(1))).variance
        tensor([0.0434])
    """
    return through(_SIGMOID, input)


@moment_rule(F.tanh, torch.tanh, kind=Kind.ELEMENTWISE)
def tanh(input: GaussianMoments) -> GaussianMoments:
    r"""Moments of :math:`\tanh x = 2\,\mathrm{sigmoid}(2x) - 1`.

    Status: as :func:`sigmoid`.

    Example:
        >>> tanh(GaussianMoments(torch.zeros(1), torch.ones(1))).variance
        tensor([0.3943])
    """
    return through(_TANH, input)


@moment_rule(torch.erf, torch.special.erf, kind=Kind.ELEMENTWISE)
def erf(input: GaussianMoments) -> GaussianMoments:
    """Moments of the error function.

    Status: exact, by closed forms and Owen's T function (:mod:`pyro_dvi.moments.activations.normal`).
    """
    return through(moments_of_erf, input)


@moment_rule(F.softplus, kind=Kind.ELEMENTWISE)
def softplus(input: GaussianMoments, beta: float = 1, threshold: float = 20) -> GaussianMoments:
    r"""Moments of :math:`\log(1 + e^{\beta x}) / \beta`.

    Status: exact to 1e-8 (float64), 1e-4 (float32): :mod:`pyro_dvi.moments.activations.smooth`. Torch replaces
    the function by x where :math:`\beta x` exceeds the threshold; the rule does not, a difference of
    :math:`e^{-\mathrm{threshold}}/\beta` at most.

    Example:
        >>> softplus(GaussianMoments(torch.zeros(1), torch.ones(1))).loc
        tensor([0.8061])
    """
    if beta == 1:
        return through(_SOFTPLUS, input)
    centre = partial(F.softplus, beta=beta, threshold=threshold)
    return through(Rescaled(centre, SOFTPLUS, inner=float(beta), outer=1 / beta), input)


@moment_rule(F.logsigmoid, kind=Kind.ELEMENTWISE)
def logsigmoid(input: GaussianMoments) -> GaussianMoments:
    r"""Moments of :math:`-\mathrm{softplus}(-x)`.

    Status: as :func:`softplus`.
    """
    return through(_LOGSIGMOID, input)


@moment_rule(F.silu, kind=Kind.ELEMENTWISE)
def silu(input: GaussianMoments) -> GaussianMoments:
    r"""Moments of :math:`x\,\mathrm{sigmoid}(x)`.

    Status: as :func:`softplus`.

    Example:
        >>> silu(GaussianMoments(torch.zeros(1), torch.ones(1))).loc
        tensor([0.2066])
    """
    return through(_SILU, input)


@moment_rule(F.gelu, kind=Kind.ELEMENTWISE)
def gelu(input: GaussianMoments, *, approximate: str = "none") -> GaussianMoments:
    r"""Moments of :math:`x\,\Phi(x)`, or of its approximation by tanh.

    Status: exact, by closed forms and Owen's T function (:mod:`pyro_dvi.moments.activations.normal`); the approximation
    as :func:`softplus`.

    Example:
        >>> gelu(GaussianMoments(torch.zeros(1), torch.ones(1))).loc
        tensor([0.2821])
    """
    return through(_GELU_TANH if approximate == "tanh" else moments_of_gelu, input)


@moment_rule(F.mish, kind=Kind.ELEMENTWISE)
def mish(input: GaussianMoments) -> GaussianMoments:
    r"""Moments of :math:`x\tanh(\mathrm{softplus}(x))`.

    Status: as :func:`softplus`.
    """
    return through(_MISH, input)


@moment_rule(F.glu)
def glu(input: GaussianMoments, dim: int = -1) -> GaussianMoments:
    r"""Moments of :math:`a\,\mathrm{sigmoid}(b)` for the halves a and b along a dimension.

    Status: exact for independent elements, as exact as :func:`~pyro_dvi.moments.activations.sigmoidal.sigmoid`.

    Example:
        >>> glu(GaussianMoments(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0])))
        GaussianMoments(loc=tensor([1.]), variance=tensor([0.2500]))
    """
    if input.shape[dim] % 2:
        raise ValueError(f"F.glu halves a dimension of even size, got {tuple(input.shape)} and dim={dim}")
    halves = zip(torch.chunk(input.loc, 2, dim), torch.chunk(input.variance, 2, dim), strict=True)
    values, gates = (GaussianMoments(loc, variance) for loc, variance in halves)
    return mul(values, sigmoid(gates))
