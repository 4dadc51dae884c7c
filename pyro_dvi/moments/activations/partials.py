# SPDX-License-Identifier: Apache-2.0
"""One node of the autograd graph for a rule that knows its own derivatives."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pyro_dvi.moments.floor import floored
from pyro_dvi.moments.value import GaussianMoments

__all__ = ["Partials", "Result", "through"]


class Partials(NamedTuple):
    r"""Slopes of the mean m and variance v of :math:`f(x)` in those of :math:`x\sim\mathcal N(\mu,\sigma^2)`."""

    mean_by_mu: Tensor
    mean_by_variance: Tensor
    variance_by_mu: Tensor
    variance_by_variance: Tensor


class Result(NamedTuple):
    """Mean and variance, and their slopes if they were asked for."""

    mean: Tensor
    variance: Tensor
    partials: Partials | None


Compute = Callable[[Tensor, Tensor, bool], Result]


def through(compute: Compute, x: GaussianMoments) -> GaussianMoments:
    """Return the moments that ``compute(mu, variance, slopes)`` finds, with its slopes as derivatives.

    Whatever ``compute`` builds on the way is not recorded: memory for backward is four numbers for each element. Half
    precision is computed in float32.

    Args:
        compute: gets contiguous or strided tensors of one shape, the variance at least the floor, and whether slopes
            are needed.
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
        result = compute(mu, variance, slopes)
        if result.partials is not None:
            ctx.save_for_backward(*result.partials)
        return result.mean, result.variance.clamp_min(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_mean: Tensor, g_spread: Tensor) -> tuple[Tensor, Tensor, None, None]:
        mean_mu, mean_variance, spread_mu, spread_variance = ctx.saved_tensors
        by_mu = torch.addcmul(g_mean * mean_mu, g_spread, spread_mu)
        by_variance = torch.addcmul(g_mean * mean_variance, g_spread, spread_variance)
        return by_mu, by_variance, None, None
