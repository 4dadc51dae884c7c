# SPDX-License-Identifier: Apache-2.0
r"""Convolution and batch normalisation with a fast second derivative.

A squared-gradient penalty differentiates twice: once to obtain the gradient :math:`\tilde g`, and once through it.
PyTorch composes the second derivative of a convolution from further convolutions with unusual strides and swapped axes.
For a batch normalisation, it takes about twenty passes over the activations. The formulas here, and those of
:class:`~pyro_dvi.core.batch_norm.BatchNorm`, use only the kernels of an ordinary forward and backward pass. Inside
:class:`FastSecondDerivatives`, every ``conv1d/2d/3d`` and training-mode ``batch_norm`` of unmodified user code uses
these formulas, and on a GPU ``softplus`` as well; values and derivatives are the same up to rounding.

To add a function, write its backward pass as a second :class:`torch.autograd.Function`, and add a wrapper to the table
at the end. The wrapper returns ``NotImplemented`` for arguments that PyTorch should handle.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from pyro_dvi.core.batch_norm import BatchNorm
from pyro_dvi.core.elementwise import Elementwise, fuses
from pyro_dvi.curvature.per_example.convolution import per_dimension


class FastSecondDerivatives(TorchFunctionMode):
    """A context in which convolutions and batch normalisations have hand-written second derivatives.

    Example:
        >>> layer, x = torch.nn.Conv2d(1, 2, 3), torch.ones(1, 1, 3, 3)
        >>> with FastSecondDerivatives():
        ...     y = layer(x).exp().sum()
        >>> (g,) = torch.autograd.grad(y, layer.bias, create_graph=True)
        >>> (h,) = torch.autograd.grad(g.sum(), layer.bias)
        >>> torch.allclose(g, h)
        True
    """

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        rule = _REPLACED.get(func)
        # Unlike PyTorch's own functions, custom Functions cannot run inside vmap or jvp.
        if rule is not None and torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active():
            result = rule(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        return func(*args, **(kwargs or {}))


# Convolution ---------------------------------------------------------------------------------------------------
# y = x * w.  First backward:  gx = g *ᵀ w,  gw = x ⋆ g.  With cotangents (ax, aw, ab) of (gx, gw, gb), the scalar
# <ax, gx> + <aw, gw> + <ab, gb> = <g, ax * w + x * aw + ab> is linear in each of g, x and w, so that
#   ∂g = ax * w + x * aw + ab,   ∂x = g *ᵀ aw,   ∂w = ax ⋆ g:
# one forward and one backward convolution each, never a transposed-axes one.


class _Convolution(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: tuple) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry = geometry
        return torch.ops.aten.convolution(x, weight, bias, *geometry)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        needed = list(ctx.needs_input_grad[:3])
        return (*_ConvolutionBackward.apply(g, x, weight, ctx.geometry, needed), None)


class _ConvolutionBackward(Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor, weight: Tensor, geometry: tuple, needed: list[bool]) -> tuple:
        ctx.save_for_backward(g, x, weight)
        ctx.geometry = geometry
        ctx.set_materialize_grads(False)
        return torch.ops.aten.convolution_backward(g, x, weight, [weight.shape[0]], *geometry, needed)

    @staticmethod
    def backward(ctx: Any, ax: Tensor | None, aw: Tensor | None, ab: Tensor | None) -> tuple:
        g, x, weight = ctx.saved_tensors
        aten, geometry = torch.ops.aten, ctx.geometry
        dg = dx = dw = None
        if ctx.needs_input_grad[0]:
            if ax is not None:
                dg = aten.convolution(ax, weight, ab, *geometry)
            if aw is not None:
                direct = aten.convolution(x, aw, ab if dg is None else None, *geometry)
                dg = direct if dg is None else dg.add_(direct)
            if dg is None and ab is not None:
                dg = ab.reshape(-1, *[1] * (g.dim() - 2)).expand_as(g)
        if aw is not None and ctx.needs_input_grad[1]:
            dx = aten.convolution_backward(g, x, aw, None, *geometry, [True, False, False])[0]
        if ax is not None and ctx.needs_input_grad[2]:
            dw = aten.convolution_backward(g, ax, weight, None, *geometry, [False, True, False])[1]
        return dg, dx, dw, None, None


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    n = weight.dim() - 2
    plain = isinstance(padding, (int, tuple, list)) and input.dim() == weight.dim()
    if not plain or not input.is_floating_point() or torch.is_autocast_enabled(input.device.type):
        return NotImplemented
    sizes = (per_dimension(size, n) for size in (stride, padding, dilation))
    geometry = (*sizes, False, [0] * n, groups)  # not transposed
    return _Convolution.apply(input, weight, bias, geometry)


# Softplus on a GPU, where PyTorch takes eight passes over the activations for the derivative of its derivative ------

_SLOPE = "T z = exp(x < 0 ? x : -x), s = 1 / (1 + z), slope = x > 20 ? T(1) : x < 0 ? z * s : s;"
_SOFTPLUS = Elementwise(
    "softplus",
    "y",
    "y = x > 20 ? x : log1p(exp(x));",
    lambda x: F.softplus(x),
    Elementwise(
        "softplus_backward",
        "gx",
        _SLOPE + "gx = g * slope;",
        lambda g, x: torch.ops.aten.softplus_backward(g, x, 1, 20),
        Elementwise(
            "softplus_double_backward",
            "gg, gx",
            _SLOPE + "gg = a * slope; gx = x > 20 ? T(0) : a * g * z * s * s;",
            lambda a, g, x: (
                torch.ops.aten.softplus_backward(a, x, 1, 20),
                torch.where(x > 20, 0.0, a * g * torch.sigmoid(x) * torch.sigmoid(-x)),
            ),
        ),
    ),
)


def _softplus(input: Tensor, beta: float = 1, threshold: float = 20) -> Any:
    return _SOFTPLUS(input) if (beta, threshold) == (1, 20) and fuses(input) else NotImplemented


# Batch normalisation in training mode --------------------------------------------------------------------------


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    mixed = weight is None or bias is None or weight.dtype != input.dtype
    if not training or mixed or input.numel() == input.shape[1]:
        return NotImplemented
    return BatchNorm.apply(input, weight, bias, running_mean, running_var, momentum, eps)[0]


_REPLACED: dict[Callable, Callable] = {
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _convolution),
    F.softplus: _softplus,
    F.batch_norm: _batch_norm,
}
