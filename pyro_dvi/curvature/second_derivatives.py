# SPDX-License-Identifier: Apache-2.0
r"""Convolution and batch normalisation with a fast second derivative.

A squared-gradient penalty differentiates twice: once to obtain the gradient :math:`\tilde g`, and once through it.
PyTorch composes the second derivative of a convolution from further convolutions with unusual strides and swapped axes.
For a batch normalisation, it takes about twenty passes over the activations. The formulas below use only the kernels of
an ordinary forward and backward pass. Inside :class:`FastSecondDerivatives`, every ``conv1d/2d/3d`` and training-mode
``batch_norm`` of unmodified user code uses these formulas; values and derivatives are the same up to rounding.

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

from pyro_dvi.curvature.per_example.convolution import per_dimension
from pyro_dvi.errors import UnsupportedError


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


# Batch normalisation in training mode --------------------------------------------------------------------------
# With x̂ = (x − m) r, r = (var + ε)^(−1/2) and means over all but the channel axis, the first backward is
#   gx = γ r (g − ḡ − x̂ q),  q = mean(g x̂).
# For a cotangent a of gx let p = mean(a x̂) and c = mean(a g) − ā ḡ. Then <a, gx> = n γ r (c − p q), whence
#   ∂g = γ r (a − ā − x̂ p)                     the first backward again, applied to a
#   ∂γ = n r (c − p q)
#   ∂x = γ r² [(3 p q − c) x̂ − q (a − ā) − p (g − ḡ)].
# If γ and β are latent weights as well, cotangents a_γ and a_β of sum(g x̂) and sum(g) add
#   ∂g += a_γ x̂ + a_β,   ∂x += a_γ r (g − ḡ − x̂ q).
# Sums of g and g x̂ (and of a, a x̂) are by-products of the fused first backward. The rest are combinations of
# x, a and g with coefficients per channel.


class _BatchNorm(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor,
        beta: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
    ) -> Tensor:
        y, mean, inv_std = torch.ops.aten.native_batch_norm(
            x, gamma, beta, running_mean, running_var, True, momentum, eps
        )
        ctx.save_for_backward(x, gamma, mean, inv_std)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        gx, g_gamma, g_beta = _BatchNormBackward.apply(g, *ctx.saved_tensors, ctx.eps)
        return gx, g_gamma, g_beta, None, None, None, None


class _BatchNormBackward(Function):
    @staticmethod
    def forward(
        ctx: Any, g: Tensor, x: Tensor, gamma: Tensor, mean: Tensor, inv_std: Tensor, eps: float
    ) -> tuple:
        gx, sum_g_xhat, sum_g = _fused_backward(g, x, gamma, mean, inv_std, eps)
        ctx.save_for_backward(g, x, gamma, mean, inv_std, sum_g_xhat, sum_g)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return gx, sum_g_xhat, sum_g

    @staticmethod
    def backward(ctx: Any, a: Tensor | None, a_gamma: Tensor | None, a_beta: Tensor | None) -> tuple:
        if torch.is_grad_enabled():  # m and r below are constants, so a third derivative would be wrong
            raise UnsupportedError(
                "batch_norm has no third derivative, neither here nor in PyTorch: do not use create_graph=True for "
                "the gradient of a squared-gradient penalty, or use batch normalisation in evaluation mode"
            )
        g, x, gamma, m, r, *sums = ctx.saved_tensors
        n = x.numel() // x.shape[1]
        latent = a_gamma is not None or a_beta is not None
        a = torch.zeros_like(g) if a is None else a
        a_gamma = torch.zeros_like(m) if a_gamma is None else a_gamma
        a_beta = torch.zeros_like(m) if a_beta is None else a_beta
        dg, *sums_of_a = _fused_backward(a, x, gamma, m, r, ctx.eps)
        q, g_bar, p, a_bar = (torch.stack([*sums, *sums_of_a]) / n).unbind()
        # With g in place of the input, the same kernel sums n r c for the weight, in one pass over a and g.
        rc = _fused_backward(a, g, gamma, g_bar, r, ctx.eps, input_too=False)[1] / n
        d_gamma = torch.addcmul(rc, r * p, q, value=-1).mul_(n)
        # ∂x = constant − on_x x − on_a a + on_g g,   ∂g += t x + shift
        t, scale = a_gamma * r, gamma * r
        k = scale * r
        on_a = k * q
        on_g = torch.addcmul(t, k, p, value=-1)
        on_x = (scale * rc).addcmul_(on_g, q).addcmul_(on_a, p, value=-2).mul_(r)
        constant = (on_x * m).addcmul_(on_a, a_bar).addcmul_(on_g, g_bar, value=-1)
        shift = torch.addcmul(a_beta, t, m, value=-1)
        wide = torch.stack([on_x, on_a, on_g, constant, t, shift]).view(6, -1, *[1] * (x.dim() - 2))
        on_x, on_a, on_g, constant, t, shift = wide.unbind()
        dx = torch.addcmul(constant, x, on_x, value=-1).addcmul_(a, on_a, value=-1).addcmul_(g, on_g)
        if latent:
            dg.addcmul_(x, t).add_(shift)
        return dg, dx, d_gamma, None, None, None


def _fused_backward(
    g: Tensor, x: Tensor, gamma: Tensor, m: Tensor, r: Tensor, eps: float, *, input_too: bool = True
) -> Any:
    """Return gx, and the sums of g x̂ and g for each channel. Kernels of some devices need gamma even for sums alone."""
    return torch.ops.aten.native_batch_norm_backward(
        g, x, gamma, None, None, m, r, True, eps, [input_too, True, True]
    )


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
    return _BatchNorm.apply(input, weight, bias, running_mean, running_var, momentum, eps)


_REPLACED: dict[Callable, Callable] = {
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _convolution),
    F.batch_norm: _batch_norm,
}
