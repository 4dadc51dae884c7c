# SPDX-License-Identifier: Apache-2.0
"""KL divergences of many Gaussians from Normal priors, with few operator calls and few passes over the weights.

Sums are computed site by site, so that intermediate results stay in the processor's cache; gradients, which must be
stored, are computed with torch's foreach operations. A prior that all weights of a site share is applied after the sum
over the site.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

Tensors = Sequence[Tensor]  # one tensor per site


def row_norms(x: Tensor) -> Tensor:
    """Return a tensor with the same norm and fewer elements, to reduce rounding errors in torch's sums of squares."""
    return torch.linalg.vector_norm(x.flatten(1), dim=1) if x.dim() > 1 and x.numel() > 1 << 18 else x


def normal_divergence(locs: Tensors, scales: Tensors, prior_locs: Tensors, prior_scales: Tensors) -> Tensor:
    r"""Return the KL divergence of Gaussians from Normal priors, summed over all sites and their elements.

    .. math:: \sum \tfrac12\Bigl(\frac{\sigma^2 + (\mu - m)^2}{s^2} - 1\Bigr) - \log\frac{\sigma}{s}

    Status: exact. Differentiable once, except with respect to the means of priors.

    Args:
        locs: means of each site (at least one), all with one dtype and device.
        scales: standard deviations, of the same shapes.
        prior_locs: mean m of each site's prior, a scalar.
        prior_scales: standard deviation s of each site's prior, a scalar; all with one dtype and device, which may be
            the CPU.

    Example:
        >>> loc, scale = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 2.0])
        >>> normal_divergence([loc], [scale], [torch.tensor(0.0)], [torch.tensor(2.0)])
        tensor(0.4431)
    """
    known = [_logarithm(scale) for scale in scales]
    squares, logs = _GaussianSums.apply(known, len(locs), *locs, *prior_locs, *scales)
    return _total(squares, logs, locs, prior_scales) - 0.5 * _size(locs)


def minus_log_density(values: Tensors, prior_locs: Tensors, prior_scales: Tensors) -> Tensor:
    r"""Return minus the summed log density of values under Normal priors, which is the divergence of point masses.

    .. math:: \sum \frac{(w - m)^2}{2 s^2} + \log s + \tfrac12\log 2\pi

    Status: exact. Arguments and derivatives are as in :func:`normal_divergence`.

    Example:
        >>> minus_log_density([torch.tensor([0.0, 1.0])], [torch.tensor(0.0)], [torch.tensor(1.0)])
        tensor(2.3379)
    """
    squares, _ = _GaussianSums.apply([], len(values), *values, *prior_locs)
    return _total(squares, None, values, prior_scales) + 0.5 * math.log(2 * math.pi) * _size(values)


def multiplicative_divergence(
    locs: Tensors, alphas: Tensors, eps: Sequence[float], prior_locs: Tensors, prior_scales: Tensors
) -> Tensor:
    r"""Return the KL divergence of multiplicative noise from Normal priors, summed over all sites and their weights.

    With :math:`v_{ij} = \alpha_j m_{ij}^2 + \varepsilon` and the prior :math:`\mathcal N(m_0, s^2)`,

    .. math::
        \sum_{ij} \tfrac12\Bigl(\frac{v_{ij} + (m_{ij} - m_0)^2}{s^2} - 1 - \log\frac{v_{ij}}{s^2}\Bigr).

    Status: exact. Differentiable like :func:`normal_divergence`.

    Args:
        locs: means m of each site.
        alphas: relative variances, broadcastable to ``locs``.
        eps: :math:`\varepsilon` of each site.
        prior_locs: as in :func:`normal_divergence`.
        prior_scales: as in :func:`normal_divergence`.

    Source: Schmitt & Roth (2021), Eq. 17, for :math:`m_0 = 0`.

    Example:
        >>> loc, alpha = torch.tensor([[1.0, -2.0]]), torch.tensor([[0.01, 0.25]])
        >>> multiplicative_divergence(
        ...     [loc], [alpha], [1e-8], [torch.tensor(0.0)], [torch.tensor(2.0)]
        ... )
        tensor(3.4401)
    """
    squares, _ = _GaussianSums.apply([], len(locs), *locs, *prior_locs)
    variances, logs = _MultiplicativeSums.apply(eps, *locs, *alphas)
    return _total(squares + variances, 0.5 * logs, locs, prior_scales) - 0.5 * _size(locs)


def _size(values: Tensors) -> int:
    return sum(value.numel() for value in values)


def _total(squares: Tensor, logs: Tensor | None, values: Tensors, prior_scales: Tensors) -> Tensor:
    """Return ½ squares / s² + n log s minus the logarithms, summed over sites."""
    scales = torch.stack(list(prior_scales)).to(squares.device)  # scalars may be on the CPU
    volumes = torch._foreach_mul(scales.log().unbind(), [float(value.numel()) for value in values])
    terms = 0.5 * squares / scales.square() + torch.stack(volumes)
    return (terms if logs is None else terms - logs).sum()


def _logarithm(scale: Tensor) -> Tensor | None:
    """Return the parameter whose exponential is the scale; None for other scales."""
    node = scale.grad_fn
    if node is None or node.name() != "ExpBackward0":
        return None
    return getattr(node.next_functions[0][0], "variable", None)


def _in_groups(tensors: Sequence[Any], size: int) -> list[list[Any]]:
    return [list(tensors[start : start + size]) for start in range(0, len(tensors), size)]


class _GaussianSums(Function):
    """‖μ − m‖² of each site; if there are scales, ‖μ − m‖² + ‖σ‖² and Σ log σ."""

    @staticmethod
    def forward(
        ctx: Any, known: list[Tensor | None], size: int, *tensors: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(*tensors)
        ctx.size = size
        locs, prior_locs, *scales = _in_groups(tensors, size)
        pairs = zip(locs, prior_locs, strict=True)
        norms = [torch.linalg.vector_norm(row_norms(loc - m)) for loc, m in pairs]
        if not scales:
            return torch.stack(norms).square(), None
        norms += torch._foreach_norm(list(map(row_norms, scales[0])))
        squares = torch.stack(norms).square().view(2, size).sum(0)
        pairs = zip(known, scales[0], strict=True)
        return squares, torch.stack([(scale.log() if log is None else log).sum() for log, scale in pairs])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_squares: Tensor, of_logs: Tensor) -> tuple[Tensor | None, ...]:
        locs, prior_locs, *scales = _in_groups(ctx.saved_tensors, ctx.size)
        weights = list((2 * of_squares).unbind())
        d_locs = torch._foreach_sub(locs, prior_locs)
        torch._foreach_mul_(d_locs, weights)
        d_scales: Sequence[Tensor] = ()
        if scales:
            d_scales = torch._foreach_mul(scales[0], weights)
            torch._foreach_addcdiv_(d_scales, of_logs.unbind(), scales[0])
        return None, None, *d_locs, *[None] * ctx.size, *d_scales


class _MultiplicativeSums(Function):
    """Σ v and Σ log v of each site, with v = α m² + ε."""

    @staticmethod
    def forward(ctx: Any, eps: Sequence[float], *tensors: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*tensors)
        ctx.eps = eps
        sums: list[Tensor] = []
        logs: list[Tensor] = []
        for loc, alpha, e in zip(*_in_groups(tensors, len(eps)), eps, strict=True):
            variance = (loc * alpha).mul_(loc).add_(e)
            sums.append(variance.sum())
            logs.append(variance.log_().sum())
        return torch.stack(sums), torch.stack(logs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out: Tensor, of_logs: Tensor) -> tuple[Tensor | None, ...]:
        locs, alphas = _in_groups(ctx.saved_tensors, len(ctx.eps))
        pulls = torch._foreach_mul(locs, alphas)  # becomes m times twice the derivative with respect to v
        torch._foreach_mul_(pulls, locs)
        torch._foreach_add_(pulls, list(ctx.eps))
        torch._foreach_reciprocal_(pulls)
        torch._foreach_mul_(pulls, (2 * of_logs).unbind())
        torch._foreach_add_(pulls, (2 * out).unbind())
        torch._foreach_mul_(pulls, locs)
        slopes = [(p * m).sum_to_size(a.shape) for p, m, a in zip(pulls, locs, alphas, strict=True)]
        torch._foreach_mul_(pulls, alphas)
        return None, *pulls, *torch._foreach_mul(slopes, 0.5)
