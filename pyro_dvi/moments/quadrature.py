# SPDX-License-Identifier: Apache-2.0
r"""Quadrature over Gaussians: nodes, blockwise evaluation, and one rule for functions with a bend at zero.

An elementwise function is computed block by block, in one node of the autograd graph. Intermediate results of a block
stay in the cache, and only four numbers per element are saved for the backward pass.

:class:`BothSides` integrates on each side of zero separately. On each side, the range :math:`\mu \pm R\sigma` covers
the values of :math:`|x|` from a to b, which are transformed to w:

.. math:: |x| = (c + a)\,e^w - c, \qquad 0 \le w \le \log\frac{c + b}{c + a},

which places nodes densely near the bend of width c and suits slowly decaying tails. The integral over w uses
Gauss-Legendre quadrature. Differences :math:`d = f(x) - f(\mu)` are computed from :math:`\delta = x - \mu`, so they are
accurate however small σ is.

Status: accurate to 1e-8 (float64), 1e-4 (float32).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes

from pyro_dvi.core.elementwise import Elementwise, fuses
from pyro_dvi.core.recorder import is_for_any_rows, is_recording
from pyro_dvi.moments.dispatch import Kind
from pyro_dvi.moments.rules import moment_rule
from pyro_dvi.moments.value import GaussianMoments, floored

ROOT_HALF = math.sqrt(0.5)
DENSITY = 1 / math.sqrt(2 * math.pi)  # at zero
Column = tuple[tuple[float], ...]
Nodes = tuple[Column, Column]

# Elements per block, few enough that the values at all quadrature nodes fit into the cache. A function that needs more
# numbers per element has a smaller ``block``.
_BLOCK, _ACCELERATED_BLOCK = 1 << 14, 1 << 18

# compute(mu, variance, slopes) returns mean and variance of f(x) and, with slopes, ∂mean/∂μ, ∂mean/∂σ², ∂variance/∂μ
# and ∂variance/∂σ².
Compute = Callable[[Tensor, Tensor, bool], list[Tensor]]


def constants(numbers: Any, like: Tensor) -> Tensor:
    """Return numbers as a tensor with the dtype and device of ``like``, from a cache.

    Under ``torch.compile`` and ``torch.export``, the tensor is created anew.
    """
    if type(like) is not Tensor or torch.compiler.is_compiling():
        return torch.tensor(numbers, dtype=like.dtype, device=like.device)
    return _kept(numbers, like.dtype, like.device)


@lru_cache(maxsize=256)
def _kept(numbers: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    # An inference tensor could not be used in training later, and recorded steps must share the cached tensor.
    with torch.inference_mode(False), _disable_current_modes():
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
    """Return an array as nested tuples for :func:`constants`: one entry per node, along the first dimension."""
    return tuple((float(x),) for x in numbers)


# For float64 and float32: half-range in standard deviations, and nodes and weights on [0, 1].
_HALF_LINES = (9.0, gauss_legendre(48)), (6.5, gauss_legendre(26))


def distribution(z: Tensor) -> Tensor:
    r"""Return :math:`\Phi(z)`, computed with erfc, which is accurate in the left tail."""
    return torch.special.erfc(z * -ROOT_HALF) * 0.5


def through(compute: Compute, x: GaussianMoments) -> GaussianMoments:
    """Return the moments that ``compute(mu, variance, slopes)`` returns, with its slopes as their derivatives.

    Compiled code and predictors compute all elements at once; other code computes them block by block. Tensors of half
    precision are computed in float32.

    Args:
        compute: a function of one-dimensional means, of variances that are at least the floor, and of a flag that
            requests slopes. It returns mean and variance and, with slopes, the derivatives of the mean with respect to
            μ and σ², followed by the derivatives of the variance.
        x: moments of the input.
    """
    dtype = x.loc.dtype
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    mu, variance = x.loc.to(wide), x.variance.to(wide)
    mean, spread = _Through.apply(mu, floored(variance), compute, torch.is_grad_enabled())
    return GaussianMoments(mean.to(dtype), spread.to(dtype))


def elementwise_rule(compute: Compute, *functions: Callable) -> Callable[[GaussianMoments], GaussianMoments]:
    """Register ``compute`` as the rule of torch functions of one argument."""

    def rule(input: GaussianMoments) -> GaussianMoments:
        """Moments of an elementwise function."""
        return through(compute, input)

    return moment_rule(*functions, kind=Kind.ELEMENTWISE)(rule)


class _Through(Function):
    @staticmethod
    def forward(
        ctx: Any, mu: Tensor, variance: Tensor, compute: Compute, recording: bool
    ) -> tuple[Tensor, Tensor]:
        slopes = recording and any(ctx.needs_input_grad[:2])
        mean, spread, *partials = _in_blocks(compute, mu, variance, slopes)
        ctx.save_for_backward(*partials)
        return mean, spread.clamp_min(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_mean: Tensor, g_spread: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return *_CHAIN(g_mean, g_spread, *ctx.saved_tensors), None, None


_CHAIN = Elementwise(
    "chain",
    "g_mu, g_v",
    "g_mu = g_mean * mean_mu + g_spread * spread_mu; g_v = g_mean * mean_v + g_spread * spread_v;",
    lambda g_mean, g_spread, mean_mu, mean_v, spread_mu, spread_v: (
        torch.addcmul(g_mean * mean_mu, g_spread, spread_mu),
        torch.addcmul(g_mean * mean_v, g_spread, spread_v),
    ),
)


def _in_blocks(compute: Compute, mu: Tensor, variance: Tensor, slopes: bool) -> list[Tensor]:
    shape = mu.shape
    mu, variance = mu.reshape(-1), variance.reshape(-1)
    on_cpu = mu.device.type == "cpu"
    block = getattr(compute, "block", _BLOCK) if on_cpu else _ACCELERATED_BLOCK
    together = torch.compiler.is_compiling() or is_for_any_rows() or (is_recording() and not on_cpu)
    if together or mu.numel() <= block or (hasattr(compute, "one_kernel") and fuses(mu, variance)):
        parts = compute(mu, variance, slopes)
    else:
        pairs = zip(mu.split(block), variance.split(block), strict=True)
        pieces = [compute(m, v, slopes) for m, v in pairs]
        parts = [torch.cat(p) for p in zip(*pieces, strict=True)]
    return [t.reshape(shape) for t in parts]


def from_scores(
    centre: Tensor,
    sigma: Tensor,
    variance: Tensor,
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    slopes: bool,
) -> list[Tensor]:
    r"""Return moments of f, and their slopes computed with the score of the Gaussian.

    .. math::
        \frac{\partial}{\partial\mu}\mathrm E[g] = \frac{\mathrm E[g z]}{\sigma}, \qquad
        \frac{\partial}{\partial\sigma^2}\mathrm E[g] = \frac{\mathrm E[g\,(z^2 - 1)]}{2\sigma^2}.

    Args:
        centre: f(μ).
        sigma: σ.
        variance: σ².
        first: expectations of d, d z and d z².
        second: expectations of d², d² z and d² z².
        slopes: whether to return slopes; only they need the expectations with z and z².
    """
    shift = first[0]
    mean, spread = centre + shift, torch.addcmul(second[0], shift, shift, value=-1)
    if not slopes:
        return [mean, spread]
    by_mu, by_variance = first[1] / sigma, (first[2] - shift) * 0.5 / variance
    spread_by_mu = second[1] / sigma - 2 * shift * by_mu
    spread_by_variance = (second[2] - second[0]) * 0.5 / variance - 2 * shift * by_variance
    return [mean, spread, by_mu, by_variance, spread_by_mu, spread_by_variance]


@dataclass(frozen=True)
class BothSides:
    """A function that is smooth on each side of zero.

    Attributes:
        function: f.
        difference: function that computes f(x) - f(μ) from x, μ and x - μ.
        width: c, the distance from zero over which f bends.
        block: number of elements computed at once.
    """

    function: Callable[[Tensor], Tensor]
    difference: Callable[[Tensor, Tensor, Tensor], Tensor]
    width: float = 1.0
    block: int = 1 << 12

    def __call__(self, mu: Tensor, variance: Tensor, slopes: bool) -> list[Tensor]:
        """Return mean, variance and their slopes."""
        sigma = variance.sqrt()
        first, second = ([torch.zeros_like(mu) for _ in range(3)] for _ in range(2))  # E[d z^k], E[d² z^k]
        reach, columns = _HALF_LINES[mu.dtype is not torch.float64]
        nodes, weights = (constants(c, mu) for c in columns)
        for side in (1.0, -1.0):
            centre = side * mu
            start = torch.maximum(-centre, -reach * sigma)  # from the mean
            scale = (centre + start).add_(self.width)
            length = torch.log1p((reach * sigma - start).clamp_min_(0) / scale)
            density = length * scale * DENSITY / sigma
            growth = length * nodes
            step = torch.expm1(growth).mul_(scale)
            delta = start + step
            z = delta / sigma
            weight = growth.addcmul_(z, z, value=-0.5).exp_().mul_(weights).mul_(density)
            distance = step.add_(scale).sub_(self.width)
            d = self.difference(distance.mul_(side), mu, delta.mul_(side))
            weight.mul_(d)
            for k in range(3):
                sign = side if k == 1 else 1.0
                first[k].add_(weight.sum(0), alpha=sign)
                second[k].add_((weight * d).sum(0), alpha=sign)
                weight.mul_(z)
        return from_scores(self.function(mu), sigma, variance, first, second, slopes)


def through_link(x: GaussianMoments, function: Callable[[Tensor], Tensor]) -> GaussianMoments | None:
    r"""Return mean and variance of ``function(x)`` if x is itself a function of a Gaussian; otherwise None.

    A scale ``(softplus(h) + eps).sqrt()`` cannot be expanded around its mean, because softplus(h) may vary widely while
    it stays positive. The Gaussian h behind it is known (:class:`~pyro_dvi.moments.value.Link`), and the integral over
    h is smooth.

    Status: Gauss-Hermite with 32 nodes, exact up to rounding for functions that are smooth on the scale of the standard
    deviation.

    Args:
        x: moments with a link; each element depends on one element of the Gaussian.
        function: an elementwise function that is defined for every value of the link.

    Example:
        >>> h = GaussianMoments(torch.zeros(1), torch.ones(1))
        >>> through_link(torch.exp(h), torch.log).variance
        tensor([1.0000])
    """
    link = x.link
    if link is None or not link.separate or (link.elementwise and link.inner.shape != x.shape):
        return None
    loc, scale = link.inner.loc, floored(link.inner.variance).sqrt()
    nodes, weights = gauss_hermite(32)
    centre = function(link.function(loc))  # differences from it are accurate
    first, second = torch.zeros_like(centre), torch.zeros_like(centre)
    for (node,), (weight,) in zip(nodes, weights, strict=True):
        shift = function(link.function(loc + node * scale)) - centre
        first, second = first + weight * shift, second + weight * shift.square()
    return GaussianMoments(centre + first, (second - first.square()).clamp_min(0))
