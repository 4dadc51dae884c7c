# SPDX-License-Identifier: Apache-2.0
r"""The mean of the log of a sum of exponentials of Gaussian logits with covariances.

Points are spread by a Cholesky factor, through which no gradient goes: with :math:`p = \mathrm{softmax}(f)`,

.. math::
    \frac{\partial}{\partial\mu} = \mathrm E[p], \qquad
    \frac{\partial}{\partial\Sigma} = \tfrac12\mathrm E\bigl[\operatorname{diag} p - p p^\top\bigr]

are estimated at the same points (Price 1958).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.joint import covariance_of, has_covariances

_CHUNK = 2**20  # numbers held at once, points x logits


def covariance_if_any(logits: GaussianMoments) -> Tensor | None:
    """Return the covariances ``[*batch, C, C]`` of logits that share noise; None for independent ones."""
    return covariance_of(logits) if has_covariances(logits) else None


def average_jointly(mu: Tensor, covariance: Tensor, points: Tensor) -> Tensor:
    """Average ``logsumexp(f, -1)`` over points.

    Args:
        mu: ``[*batch, C]``.
        covariance: ``[*batch, C, C]``.
        points: standard Gaussian, ``[S, *batch, C]``, or with batch dimensions of size 1.

    Returns:
        ``[*batch]``, differentiable once in both.
    """
    return _MeanJointLogSumExp.apply(mu, covariance, points)


class _MeanJointLogSumExp(Function):
    @staticmethod
    def forward(ctx: Any, mu: Tensor, covariance: Tensor, points: Tensor) -> Tensor:
        root = _root(covariance)
        total: Any = 0.0
        first: Any = 0.0
        second: Any = 0.0
        for chunk in points.split(max(1, _CHUNK // max(mu.numel(), 1))):
            values = mu + torch.einsum("...ij,s...j->s...i", root, chunk)
            total = total + values.logsumexp(-1).sum(0)
            p = values.softmax(-1)
            first = first + p.sum(0)
            second = second + torch.einsum("s...i,s...j->...ij", p, p)
        first, second = first / len(points), second / len(points)
        ctx.save_for_backward(first, torch.diag_embed(first).sub_(second).mul_(0.5))
        return torch.as_tensor(total / len(points))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        first, curvature = ctx.saved_tensors
        return g[..., None] * first, g[..., None, None] * curvature, None


def _root(covariance: Tensor) -> Tensor:
    """Return a Cholesky factor, also where logits have no variance or move together."""
    diagonal = covariance.diagonal(dim1=-2, dim2=-1)
    info = torch.finfo(covariance.dtype)
    rounding = (4 * diagonal.shape[-1] * info.eps) * diagonal.amax(-1, keepdim=True) + info.tiny
    return torch.linalg.cholesky_ex(covariance + torch.diag_embed(rounding.expand_as(diagonal)))[0]
