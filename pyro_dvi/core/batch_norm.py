# SPDX-License-Identifier: Apache-2.0
r"""Batch normalisation in training mode, with a hand-written first and second derivative.

With :math:`\hat x = (x - m)\,r`, :math:`r = (\mathrm{var} + \varepsilon)^{-1/2}` and means over all but the channel
axis, the first backward pass is

.. math:: g_x = \gamma r\,(g - \bar g - \hat x q), \qquad q = \overline{g \hat x}.

For a cotangent a of :math:`g_x`, let :math:`p = \overline{a \hat x}` and :math:`c = \overline{a g} - \bar a \bar g`.
Then :math:`\langle a, g_x \rangle = n \gamma r\,(c - p q)`, whence

.. math::
    \partial g &= \gamma r\,(a - \bar a - \hat x p), \\
    \partial\gamma &= n r\,(c - p q), \\
    \partial x &= \gamma r^2\,[(3 p q - c)\,\hat x - q\,(a - \bar a) - p\,(g - \bar g)].

The first line is the first backward pass, applied to a. If γ and β are latent weights as well, cotangents
:math:`a_\gamma` and :math:`a_\beta` of :math:`\sum g \hat x` and :math:`\sum g` add

.. math::
    \partial g \mathrel{+}= a_\gamma \hat x + a_\beta, \qquad
    \partial x \mathrel{+}= a_\gamma r\,(g - \bar g - \hat x q).

Sums of g and :math:`g \hat x` (and of a and :math:`a \hat x`) are by-products of the first backward pass. The rest are
combinations of x, a and g with coefficients per channel.

PyTorch's kernels on a GPU sum a channel in a single block of threads. If a layer has few channels, they use only a
small part of a large GPU. Large layers are therefore summed in several parts of the batch.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pyro_dvi.core.elementwise import Elementwise, fuses
from pyro_dvi.errors import UnsupportedError

_LARGEST_BLOCK = 1 << 14  # elements of a channel that one block of threads sums about as fast as several


class BatchNorm(Function):
    """The normalised input, and the inverse standard deviation of each channel."""

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
    ) -> tuple[Tensor, Tensor]:
        """Normalise, and update running statistics."""
        y, mean, inv_std = torch.ops.aten.native_batch_norm(
            x, gamma, beta, running_mean, running_var, True, momentum, eps
        )
        ctx.save_for_backward(x, gamma, mean, inv_std)
        ctx.eps = eps
        ctx.mark_non_differentiable(inv_std)
        ctx.set_materialize_grads(False)
        return y, inv_std

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, _: None) -> tuple:
        """Return the gradients, which can be differentiated once more."""
        if g is None:
            return (None,) * 7
        gx, g_gamma, g_beta = _BatchNormBackward.apply(g, *ctx.saved_tensors, ctx.eps)
        return gx, g_gamma, g_beta, None, None, None, None


class _BatchNormBackward(Function):
    @staticmethod
    def forward(
        ctx: Any, g: Tensor, x: Tensor, gamma: Tensor, mean: Tensor, inv_std: Tensor, eps: float
    ) -> tuple:
        gx, sum_g_xhat, sum_g = _first_derivative(g, x, gamma, mean, inv_std, eps)
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
        dg, *sums_of_a = _first_derivative(a, x, gamma, m, r, ctx.eps)
        q, g_bar, p, a_bar = (torch.stack([*sums, *sums_of_a]) / n).unbind()
        # With g in place of the input, the same kernel sums n r c for the weight, in one pass over a and g.
        rc = _sums(a, g, gamma, g_bar, r, ctx.eps)[0] / n
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
        dx = _COMBINED(x, a, g, on_x, on_a, on_g, constant)
        if latent:
            dg.addcmul_(x, t).add_(shift)
        return dg, dx, d_gamma, None, None, None


_COMBINED = Elementwise(
    "combined",
    "dx",
    "dx = constant - on_x * x - on_a * a + on_g * g;",
    lambda x, a, g, on_x, on_a, on_g, constant: (
        torch.addcmul(constant, x, on_x, value=-1).addcmul_(a, on_a, value=-1).addcmul_(g, on_g)
    ),
)


# Sums over the batch ---------------------------------------------------------------------------------------------


def _first_derivative(g: Tensor, x: Tensor, gamma: Tensor, m: Tensor, r: Tensor, eps: float) -> Any:
    """Return gx, and the sums of g x̂ and g for each channel."""
    if _parts(g, x) == 1:
        return torch.ops.aten.native_batch_norm_backward(
            g, x, gamma, None, None, m, r, True, eps, [True, True, True]
        )
    sums = _sums(g, x, gamma, m, r, eps)
    q, g_bar = (s / (x.numel() // x.shape[1]) for s in sums)
    return _INPUT_GRADIENT(g, x, *(v.view(-1, *[1] * (x.dim() - 2)) for v in (gamma, m, r, q, g_bar))), *sums


_INPUT_GRADIENT = Elementwise(
    "input_gradient",
    "gx",
    "gx = gamma * r * (g - g_bar - (x - m) * r * q);",
    lambda g, x, gamma, m, r, q, g_bar: gamma * r * (g - g_bar - (x - m) * r * q),
)


def _sums(g: Tensor, x: Tensor, gamma: Tensor, m: Tensor, r: Tensor, eps: float) -> Any:
    """Return the sums of g x̂ and g for each channel, which do not depend on γ; PyTorch's kernels on a GPU need one."""
    parts = _parts(g, x)
    if parts > 1:  # the channels of each part follow one another in memory
        shape = (len(x) // parts, parts * x.shape[1], -1)
        g, x, m = g.view(shape), x.view(shape), m.repeat(parts)
        gamma = r = r.repeat(parts)
    sums = torch.ops.aten.native_batch_norm_backward(
        g, x, gamma, None, None, m, r, True, eps, [False, True, True]
    )[1:]
    return [s.view(parts, -1).sum(0) for s in sums] if parts > 1 else sums


def _parts(g: Tensor, x: Tensor) -> int:
    """Return the number of parts of the batch that are summed separately."""
    size = x.numel() // x.shape[1]
    if size < _LARGEST_BLOCK or not (fuses(g, x) and g.is_contiguous() and x.is_contiguous()):
        return 1
    return math.gcd(len(x), 4 * size // _LARGEST_BLOCK)
