# SPDX-License-Identifier: Apache-2.0
"""How the rule of a function of each element is computed: block by block, in one node of the autograd graph.

What a long formula writes for a block of elements stays in the cache. None of it is recorded: memory for backward is
four numbers for each element.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pyro_dvi.core.recording import is_recording
from pyro_dvi.moments.floor import floored
from pyro_dvi.moments.value import GaussianMoments

# Elements at once: with quadrature nodes for each they still fit into the cache, or into little memory. Whatever needs
# more numbers for each element has a smaller ``block``.
_BLOCK, _ACCELERATED_BLOCK = 1 << 14, 1 << 18

# compute(mu, variance, slopes): mean and variance of f(x); with slopes, then ∂mean/∂μ, ∂mean/∂σ², ∂variance/∂μ and
# ∂variance/∂σ².
Compute = Callable[[Tensor, Tensor, bool], list[Tensor]]


def through(compute: Compute, x: GaussianMoments) -> GaussianMoments:
    """Return the moments that ``compute(mu, variance, slopes)`` finds, with its slopes as derivatives.

    Compiled code gets all elements at once, others blocks of them. Half precision is computed in float32.

    Args:
        compute: takes means and variances of one dimension, the variance at least the floor, and whether slopes are
            needed; returns mean and variance, then with slopes the four derivatives: those of the mean in μ and σ²,
            those of the variance in μ and σ².
        x: moments of what enters.
    """
    dtype = x.loc.dtype
    wide = torch.promote_types(dtype, torch.float32)
    mu, variance = x.loc.to(wide), x.variance.to(wide)
    mean, spread = _Through.apply(mu, floored(variance), compute, torch.is_grad_enabled())
    return GaussianMoments(mean.to(dtype), spread.to(dtype))


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
        mean_mu, mean_variance, spread_mu, spread_variance = ctx.saved_tensors
        by_mu = torch.addcmul(g_mean * mean_mu, g_spread, spread_mu)
        by_variance = torch.addcmul(g_mean * mean_variance, g_spread, spread_variance)
        return by_mu, by_variance, None, None


def _in_blocks(compute: Compute, mu: Tensor, variance: Tensor, slopes: bool) -> list[Tensor]:
    shape = mu.shape
    mu, variance = mu.reshape(-1), variance.reshape(-1)
    block = getattr(compute, "block", _BLOCK) if mu.device.type == "cpu" else _ACCELERATED_BLOCK
    if torch.compiler.is_compiling() or is_recording() or mu.numel() <= block:
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
    r"""Return moments of f, and their slopes by the score of the Gaussian.

    .. math::
        \frac{\partial}{\partial\mu}\mathrm E[g] = \frac{\mathrm E[g z]}{\sigma}, \qquad
        \frac{\partial}{\partial\sigma^2}\mathrm E[g] = \frac{\mathrm E[g\,(z^2 - 1)]}{2\sigma^2}.

    Args:
        centre: f(μ).
        sigma: σ.
        variance: σ².
        first: expectations of d, d z and d z².
        second: those of d², d² z and d² z².
        slopes: whether to look beyond the first of each.
    """
    shift = first[0]
    mean, spread = centre + shift, torch.addcmul(second[0], shift, shift, value=-1)
    if not slopes:
        return [mean, spread]
    by_mu, by_variance = first[1] / sigma, (first[2] - shift) * 0.5 / variance
    spread_by_mu = second[1] / sigma - 2 * shift * by_mu
    spread_by_variance = (second[2] - second[0]) * 0.5 / variance - 2 * shift * by_variance
    return [mean, spread, by_mu, by_variance, spread_by_mu, spread_by_variance]
