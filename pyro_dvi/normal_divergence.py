# SPDX-License-Identifier: Apache-2.0
"""Divergence of many Gaussians from Normal priors at once: few operator calls, few passes over the weights.

What is summed goes through one site after the other, so that intermediate results stay in the processor's cache;
gradients, which have to be stored, are written by torch's operations on lists. A prior that all weights of a site share
is one number.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

__all__ = ["minus_log_density", "multiplicative_divergence", "normal_divergence"]


def normal_divergence(
    locs: Sequence[Tensor],
    scales: Sequence[Tensor],
    prior_locs: Sequence[Tensor],
    prior_scales: Sequence[Tensor],
) -> Tensor:
    r"""KL divergence of Gaussians from Normal priors, summed over all sites and their elements.

    .. math:: \sum \tfrac12\Bigl(\frac{\sigma^2 + (\mu - m)^2}{s^2} - 1\Bigr) - \log\frac{\sigma}{s}

    Status: exact. Differentiable once, in everything but prior scales that are not scalars.

    Args:
        locs: means of each site, one at least, of one dtype and device.
        scales: their standard deviations, of the same shapes.
        prior_locs: m of each site, a scalar or of the site's shape.
        prior_scales: s of each site; scalars for all sites, or of each site's shape.

    Example:
        >>> loc, scale, prior = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0]), torch.tensor(2.0)
        >>> normal_divergence([loc], [scale], [torch.tensor(0.0)], [prior])
        tensor(0.4431)
    """
    logs = [_logarithm(scale) for scale in scales]
    size = sum(loc.numel() for loc in locs)
    total = _NormalDivergence.apply(logs, len(locs), *locs, *prior_locs, *prior_scales, *scales)
    return total + _log_volume(locs, prior_scales) - 0.5 * size  # type: ignore[no-any-return]


def minus_log_density(
    values: Sequence[Tensor], prior_locs: Sequence[Tensor], prior_scales: Sequence[Tensor]
) -> Tensor:
    r"""Minus the log density of values under Normal priors, summed: what point masses pay.

    .. math:: \sum \frac{(w - m)^2}{2 s^2} + \log s + \tfrac12\log 2\pi

    Status: exact. Arguments as for :func:`normal_divergence`.

    Example:
        >>> minus_log_density([torch.tensor([0.0, 1.0])], [torch.tensor(0.0)], [torch.tensor(1.0)])
        tensor(2.3379)
    """
    size = sum(value.numel() for value in values)
    total = _NormalDivergence.apply([], len(values), *values, *prior_locs, *prior_scales)
    return total + _log_volume(values, prior_scales) + _HALF_LOG_TAU * size  # type: ignore[no-any-return]


def multiplicative_divergence(
    locs: Sequence[Tensor],
    alphas: Sequence[Tensor],
    eps: Sequence[float],
    prior_locs: Sequence[Tensor],
    prior_scales: Sequence[Tensor],
) -> Tensor:
    r"""KL divergence of multiplicative noise from Normal priors, summed over all sites and their weights.

    With :math:`v_{ij} = \alpha_j m_{ij}^2 + \varepsilon` and the prior :math:`\mathcal N(m_0, s^2)`,

    .. math::
        \sum_{ij} \tfrac12\Bigl(\frac{v_{ij} + (m_{ij} - m_0)^2}{s^2} - 1 - \log\frac{v_{ij}}{s^2}\Bigr).

    Status: exact.

    Args:
        locs: m of each site.
        alphas: relative variances, broadcastable to them.
        eps: :math:`\varepsilon` of each site.
        prior_locs: as for :func:`normal_divergence`.
        prior_scales: likewise.

    Source: Schmitt & Roth (2021), Eq. 17, there for :math:`m_0 = 0`.

    Example:
        >>> loc, alpha = torch.tensor([[1.0, -2.0]]), torch.tensor([[0.01, 0.25]])
        >>> multiplicative_divergence([loc], [alpha], [1e-8], [torch.tensor(0.0)], [torch.tensor(2.0)])
        tensor(3.4401)
    """
    size = sum(loc.numel() for loc in locs)
    pull = _NormalDivergence.apply([], len(locs), *locs, *prior_locs, *prior_scales)
    spread = _MultiplicativeSpread.apply(eps, *locs, *alphas, *prior_scales)
    return pull + spread + _log_volume(locs, prior_scales) - 0.5 * size  # type: ignore[no-any-return]


_HALF_LOG_TAU = 0.9189385332046727  # ½ log 2π


def _logarithm(scale: Tensor) -> Tensor | None:
    """The parameter whose exponential a scale is, if it is one."""
    node = scale.grad_fn
    if node is None or node.name() != "ExpBackward0":
        return None
    logarithm: Tensor | None = getattr(node.next_functions[0][0], "variable", None)
    return logarithm


def _log_volume(values: Sequence[Tensor], prior_scales: Sequence[Tensor]) -> Tensor:
    """Sum of log s over all elements."""
    logs = torch._foreach_log(list(prior_scales))
    if prior_scales[0].dim() == 0:
        return torch.stack(torch._foreach_mul(logs, [float(value.numel()) for value in values])).sum()
    return torch.stack([log.expand_as(value).sum() for log, value in zip(logs, values, strict=True)]).sum()


def _in_groups(tensors: Sequence[Tensor], size: int) -> list[list[Tensor]]:
    return [list(tensors[start : start + size]) for start in range(0, len(tensors), size)]


class _NormalDivergence(Function):
    """½ Σ ‖(μ − m) / s‖², and for those that have scales ½ Σ ‖σ / s‖² − Σ log σ."""

    @staticmethod
    def forward(ctx: Any, logs: list[Tensor | None], size: int, *tensors: Tensor) -> Tensor:
        locs, prior_locs, prior_scales, *scales = _in_groups(tensors, size)
        norm = torch.linalg.vector_norm
        shifts = (loc - prior_loc for loc, prior_loc in zip(locs, prior_locs, strict=True))
        if prior_scales[0].dim() == 0:
            norms = torch._foreach_norm(scales[0]) if scales else []
            shared = prior_scales * (1 + len(scales))
            norms = torch._foreach_div([*(norm(shift) for shift in shifts), *norms], shared)
        else:
            norms = [norm(shift / s) for shift, s in zip(shifts, prior_scales, strict=True)]
            norms += [norm(x / s) for part in scales for x, s in zip(part, prior_scales, strict=True)]
        squares = torch.stack(norms).square()
        ctx.save_for_backward(squares, *tensors)
        ctx.size = size
        total = 0.5 * squares.sum()
        if scales:
            known = zip(logs, scales[0], strict=True)
            sums = [(scale.log() if log is None else log).sum() for log, scale in known]
            total -= torch.stack(sums).sum()
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out: Tensor) -> tuple[Tensor | None, ...]:
        squares, *tensors = ctx.saved_tensors
        size, outs = ctx.size, [out] * ctx.size
        locs, prior_locs, prior_scales, *scales = _in_groups(tensors, size)
        of_locs, of_prior_locs, of_prior_scales, *of_scales = _needed(ctx, 2, size)
        none: Sequence[Tensor | None] = [None] * size
        d_locs = d_prior_locs = d_prior_scales = d_scales = none
        weights = torch._foreach_mul(outs, torch._foreach_pow(prior_scales, -2.0))
        if of_locs or of_prior_locs:
            d_locs = torch._foreach_sub(locs, prior_locs)
            torch._foreach_mul_(d_locs, weights)
        if of_prior_locs:
            d_prior_locs = [-d.sum_to_size(m.shape) for d, m in zip(d_locs, prior_locs, strict=True)]
        if of_prior_scales:
            totals = squares.view(-1, size).sum(0)
            d_prior_scales = (totals * -out / torch.stack(prior_scales)).unbind()
        if any(of_scales):
            d_scales = torch._foreach_mul(scales[0], weights)
            torch._foreach_addcdiv_(d_scales, outs, scales[0], value=-1.0)
        return None, None, *d_locs, *d_prior_locs, *d_prior_scales, *(d_scales if scales else [])


class _MultiplicativeSpread(Function):
    """½ Σ v / s² − ½ Σ log v with v = α m² + ε."""

    @staticmethod
    def forward(ctx: Any, eps: Sequence[float], *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.eps = eps
        locs, alphas, prior_scales = _in_groups(tensors, len(eps))
        scalar = prior_scales[0].dim() == 0
        sums, logs = [], []
        for loc, alpha, e, s in zip(locs, alphas, eps, prior_scales, strict=True):
            variance = (loc * alpha).mul_(loc).add_(e)
            sums.append(variance.sum() / s.square() if scalar else (variance / s.square()).sum())
            logs.append(variance.log_().sum())
        ratios = torch.stack(sums)
        ctx.ratios = ratios
        return 0.5 * (ratios - torch.stack(logs)).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out: Tensor) -> tuple[Tensor | None, ...]:
        size, outs = len(ctx.eps), [out] * len(ctx.eps)
        locs, alphas, prior_scales = _in_groups(ctx.saved_tensors, size)
        of_locs, of_alphas, of_prior_scales = _needed(ctx, 1, size)
        none: Sequence[Tensor | None] = [None] * size
        d_locs = d_alphas = d_prior_scales = none
        weights = torch._foreach_mul(outs, torch._foreach_pow(prior_scales, -2.0))
        pulls = torch._foreach_mul(locs, alphas)  # becomes twice the slope in v, times m
        torch._foreach_mul_(pulls, locs)
        torch._foreach_add_(pulls, list(ctx.eps))
        torch._foreach_reciprocal_(pulls)
        torch._foreach_mul_(pulls, [-out] * size)
        torch._foreach_add_(pulls, weights)
        torch._foreach_mul_(pulls, locs)
        if of_alphas:
            products = ((p * m).sum_to_size(a.shape) for p, m, a in zip(pulls, locs, alphas, strict=True))
            d_alphas = torch._foreach_mul(list(products), 0.5)
        if of_prior_scales:
            d_prior_scales = (ctx.ratios * -out / torch.stack(prior_scales)).unbind()
        if of_locs:
            torch._foreach_mul_(pulls, alphas)
            d_locs = pulls
        return None, *d_locs, *d_alphas, *d_prior_scales


def _needed(ctx: Any, first: int, size: int) -> list[bool]:
    """Whether some tensor of each group has a gradient."""
    needs = ctx.needs_input_grad
    return [any(needs[start : start + size]) for start in range(first, len(needs), size)]
