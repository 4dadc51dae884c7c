# SPDX-License-Identifier: Apache-2.0
r"""Moments of anything that is linear in an input and linear in a weight: one formula for all layers.

For independent factors :math:`y = \sum_j w_j x_j` has

.. math::
    \mathrm E[y] = \sum_j \mathrm E[w_j]\mathrm E[x_j], \qquad
    \mathrm{Var}[y] = \sum_j \mathrm E[w_j]^2 \mathrm{Var}[x_j]
        + \mathrm{Var}[w_j]\bigl(\mathrm E[x_j]^2 + \mathrm{Var}[x_j]\bigr).

Both lines are the same linear map with other numbers in it: the map of a convolution is a convolution. Weights with
multiplicative noise, :math:`\mathrm{Var}[w_j] = \alpha_j \mathrm E[w_j]^2`, need it only once more,

.. math::
    \mathrm{Var}[y] = \sum_j \mathrm E[w_j]^2
        \bigl(\alpha_j(\mathrm E[x_j]^2 + \mathrm{Var}[x_j]) + \mathrm{Var}[x_j]\bigr).

Status: exact for independent inputs and weights. Inputs of a deeper layer that share weights are not independent; that
is the assumption of the method.

Source: Schmitt & Roth (2021), Eq. 9 and 17; Wu et al. (2019), "Deterministic variational inference".
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pyro_dvi.moments.value import Moments, MultiplicativeMoments, loc_of, second_moment_of, variance_of

__all__ = ["bilinear_moments", "with_bias"]

# Called as product(x, weight) or, where there is a bias, product(x, weight, bias).
Map = Callable[..., Tensor]


def bilinear_moments(
    product: Map, x: Any, weight: Any, alpha: Tensor | None = None, bias: Any = None
) -> Moments:
    """Moments of ``product(x, weight)`` or ``product(x, weight, bias)``, linear in each of x and weight.

    Args:
        product: the linear map, called with means, variances or second moments.
        x: moments, or a tensor that is certain.
        weight: likewise; at least one of the two has to be uncertain.
        alpha: relative variance of the weight, of a shape that multiplies ``x``: only given where the noise of
            :class:`~pyro_dvi.moments.MultiplicativeMoments` belongs to inputs.
        bias: what the product adds at the end, certain or not. Layers add it on the way, at no cost.
    """
    shift = () if bias is None else (loc_of(bias),)
    spread = (bias.variance,) if isinstance(bias, Moments) else ()
    loc = product(loc_of(x), loc_of(weight), *shift)
    if not isinstance(weight, Moments):
        return Moments(loc, product(x.variance, weight.square(), *spread))
    if alpha is not None and isinstance(weight, MultiplicativeMoments):
        return Moments(loc, product(_noisy_input(x, alpha), weight.squared_loc, *spread))
    variance = product(_second_moment_of(x), weight.variance, *spread)
    if isinstance(x, Moments):
        variance = variance + product(x.variance, _Square.apply(weight.loc))
    return Moments(loc, variance)


def _second_moment_of(x: Any) -> Tensor:
    return _SecondMoment.apply(x.loc, x.variance) if isinstance(x, Moments) else second_moment_of(x)


def _noisy_input(x: Any, alpha: Tensor) -> Tensor:
    """Variance of the input times (1 + noise): α E[x²] + Var[x]."""
    if not isinstance(x, Moments):
        return alpha * x.square()
    return _NoisyInput.apply(x.loc, x.variance, alpha)


# The same in fewer passes over memory than autograd takes for the formulas.


class _Square(Function):
    @staticmethod
    def forward(ctx: Any, loc: Tensor) -> Tensor:
        ctx.save_for_backward(loc)
        return loc * loc

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (loc,) = ctx.saved_tensors
        return (g * loc).mul_(2)


class _SecondMoment(Function):
    @staticmethod
    def forward(ctx: Any, loc: Tensor, variance: Tensor) -> Tensor:
        ctx.save_for_backward(loc)
        return torch.addcmul(variance, loc, loc)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        (loc,) = ctx.saved_tensors
        return (g * loc).mul_(2), g


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
            g_alpha = (torch.addcmul(variance, loc, loc) * g).sum_to_size(alpha.shape)
        g_square = g * alpha
        g_variance = g + g_square
        if g_square.shape != loc.shape:  # the noise differs by batch element that the input does not have
            g_square, g_variance = g_square.sum_to_size(loc.shape), g_variance.sum_to_size(loc.shape)
        return (g_square * loc).mul_(2), g_variance, g_alpha


def with_bias(y: Moments, bias: Any) -> Moments:
    """Add a bias that broadcasts against the result, certain or not."""
    if bias is None:
        return y
    spread = variance_of(bias)
    return Moments(y.loc + loc_of(bias), y.variance if spread is None else y.variance + spread)
