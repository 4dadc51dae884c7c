# SPDX-License-Identifier: Apache-2.0
"""Squares and second moments, in fewer passes over memory than autograd takes for the formulas."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

__all__ = ["noisy_input", "second_moment", "squared"]


def squared(loc: Tensor) -> Tensor:
    """Return the square."""
    square: Tensor = _Square.apply(loc)
    return square


def second_moment(loc: Tensor, variance: Tensor) -> Tensor:
    r"""Return :math:`m^2 + v`."""
    moment: Tensor = _SecondMoment.apply(loc, variance)
    return moment


def noisy_input(loc: Tensor, variance: Tensor, alpha: Tensor) -> Tensor:
    r"""Return the variance of x times noise of mean 1, :math:`\alpha(m^2 + v) + v`.

    Args:
        loc: m.
        variance: v, of the same shape.
        alpha: relative variance of the noise, broadcastable with them.
    """
    noisy: Tensor = _NoisyInput.apply(loc, variance, alpha)
    return noisy


def _twice(a: Tensor, b: Tensor) -> Tensor:
    """Return 2ab in one pass."""
    return torch.addcmul(a.new_zeros(()), a, b, value=2)


class _Square(Function):
    @staticmethod
    def forward(ctx: Any, loc: Tensor) -> Tensor:
        ctx.save_for_backward(loc)
        return loc * loc

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return _twice(g, *ctx.saved_tensors)


class _SecondMoment(Function):
    @staticmethod
    def forward(ctx: Any, loc: Tensor, variance: Tensor) -> Tensor:
        ctx.save_for_backward(loc)
        return torch.addcmul(variance, loc, loc)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        return _twice(g, *ctx.saved_tensors), g


class _NoisyInput(Function):
    @staticmethod
    def forward(ctx: Any, loc: Tensor, variance: Tensor, alpha: Tensor) -> Tensor:
        ctx.save_for_backward(loc, variance, alpha)
        return torch.addcmul(variance, alpha, torch.addcmul(variance, loc, loc))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        loc, variance, alpha = ctx.saved_tensors
        g_alpha = None
        if ctx.needs_input_grad[2]:
            moment = torch.addcmul(variance, loc, loc)
            moment = moment.mul_(g) if g.shape == loc.shape else moment * g
            g_alpha = moment.sum_to_size(alpha.shape)
        g_loc = g * (2 * alpha)
        g_variance = torch.add(g, g_loc, alpha=0.5)
        if g.shape != loc.shape:  # noise for each of a batch of nets, inputs for all
            g_loc, g_variance = g_loc.sum_to_size(loc.shape), g_variance.sum_to_size(loc.shape)
        return g_loc.mul_(loc), g_variance, g_alpha
