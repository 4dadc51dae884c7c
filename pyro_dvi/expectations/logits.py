# SPDX-License-Identifier: Apache-2.0
r"""Estimators of the expected log-sum-exp of Gaussian logits, which has no closed form.

Every estimator returns :math:`\mathrm E[\log\sum_c e^{f_c}]` for :math:`f_c \sim \mathcal N(\mu_c, v_c)`. The logits
are independent unless they are the outputs of a last layer with covariances :math:`\Sigma`. In that case, points are
transformed with a Cholesky factor of :math:`\Sigma`, which is not differentiated. The backward pass does not
differentiate the average over points; instead, it estimates the gradient of the exact expectation at the same points.
With :math:`p = \mathrm{softmax}(f)`, it is

.. math::
    \frac{\partial}{\partial\mu} = \mathrm E[p], \qquad
    \frac{\partial}{\partial v_c} = \tfrac12\mathrm E[p_c(1 - p_c)], \qquad
    \frac{\partial}{\partial\Sigma} = \tfrac12\mathrm E\bigl[\operatorname{diag} p - p p^\top\bigr]

(Price 1958). This estimate stays accurate as the variance goes to zero. For independent logits, it needs two
accumulators of the size of the logits, whatever the number of points.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pyro_dvi.core.arguments import check_count
from pyro_dvi.errors import UnsupportedError
from pyro_dvi.expectations.points import shifted_sobol
from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.shared_noise import covariance_of, has_covariances

_CHUNK = 2**20  # largest number of points x logits held at once; it fits into the processor's cache


class LogitEstimator(ABC):
    """An estimator of the expected log-normaliser of a softmax of Gaussian logits."""

    @abstractmethod
    def expected_logsumexp(self, logits: GaussianMoments) -> Tensor:
        """Return the mean of ``logsumexp(f, -1)``.

        Args:
            logits: moments ``[*batch, C]``.

        Returns:
            ``[*batch]``, differentiable in both moments.
        """


@dataclass(frozen=True)
class Sobol(LogitEstimator):
    """Quasi-random points with a new random shift in each call.

    Status: unbiased. For ten classes and 64 points, the root mean squared error per example is .002, .013 and .04 at
    variances .1, 1 and 4; with the same number of independent samples, it is .02, .07 and .15
    (``python -m benchmarks run gaussian_logits``). The shift comes from torch's global generator, so
    ``pyro.set_rng_seed`` makes runs reproducible. All examples share one set of points.

    Args:
        num_points: number of points, preferably a power of two.
    """

    num_points: int = 64

    def __post_init__(self) -> None:
        check_count("num_points", self.num_points)

    def expected_logsumexp(self, logits: GaussianMoments) -> Tensor:
        """Return the average over the points."""
        points = shifted_sobol(self.num_points, logits.shape[-1], logits.loc)
        # With a strided view, a compiler stores the points; otherwise, a fused kernel would recompute the quantiles for
        # every example.
        shape = (len(points), *(1,) * (logits.dim() - 1), logits.shape[-1])
        points = points.as_strided(shape, (shape[-1],) * (len(shape) - 1) + (1,))
        spread = covariance_of(logits) if has_covariances(logits) else logits.variance
        return _MeanLogSumExp.apply(logits.loc, spread, points)


class _MeanLogSumExp(Function):
    """Average of the log-normaliser over points, for variances ``[*batch, C]`` or covariances ``[*batch, C, C]``."""

    @staticmethod
    def forward(ctx: Any, mu: Tensor, spread: Tensor, points: Tensor) -> Tensor:
        joint = spread.dim() > mu.dim()
        root = cholesky_root(spread) if joint else spread.clamp_min(0).sqrt()
        size, count = max(1, _CHUNK // max(mu.numel(), 1)), len(points)
        sums: list[Tensor] = []
        for chunk in [points] if count <= size else points.split(size):
            if joint:
                values = mu + torch.einsum("...ij,s...j->s...i", root, chunk)
            else:
                values = torch.addcmul(mu, chunk, root)
            found = _sums(values, joint)
            sums = [s.add_(more) for s, more in zip(sums, found, strict=True)] if sums else found
        total, first, second = sums
        first = first.div_(count)
        mean = torch.diag_embed(first) if joint else first
        ctx.save_for_backward(first, torch.sub(mean, second, alpha=1 / count).mul_(0.5))
        return total.div_(count)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        first, curvature = ctx.saved_tensors
        g = g.unsqueeze(-1)
        return g * first, (g if curvature.dim() == first.dim() else g.unsqueeze(-1)) * curvature, None


def _sums(values: Tensor, joint: bool) -> list[Tensor]:
    """Return sums over points of the log-normaliser, of p and of p² (or p pᵀ); ``values`` is overwritten."""
    highest = values.amax(-1, keepdim=True)
    total = values.sub_(highest).exp_().sum(-1, keepdim=True)
    p = values.div_(total)
    first = p.sum(0)
    second = torch.einsum("s...i,s...j->...ij", p, p) if joint else p.square_().sum(0)
    return [total.log_().add_(highest).sum(0).squeeze(-1), first, second]


@dataclass(frozen=True)
class TiltedBound(LogitEstimator):
    r"""A closed-form upper bound on the expected log-normaliser; with Gaussian logits, the ELBO stays a lower bound.

    .. math::
        \mathrm E\bigl[\log\textstyle\sum_c e^{f_c}\bigr] \le \tfrac12\sum_c a_c^2 v_c
            + \log\sum_c \exp\bigl(\mu_c + \tfrac12(1 - 2a_c)v_c\bigr)

    for every a. The optimal a solves :math:`a = \mathrm{softmax}(\mu + \tfrac12(1 - 2a)v)`.

    Status: an upper bound for Gaussian logits after any number of iterations. For ten classes, the bound is .03 above
    the exact value at variance 1 and .4 above it at variance 4.

    Args:
        num_iterations: number of Newton steps for a; each costs about as much as one softmax.

    Source: Knowles & Minka (2011), "Non-conjugate variational message passing for multinomial and binary regression".
    """

    num_iterations: int = 6

    def __post_init__(self) -> None:
        check_count("num_iterations", self.num_iterations)

    def expected_logsumexp(self, logits: GaussianMoments) -> Tensor:
        """Minimise over a, then evaluate the bound; at the optimum, a does not contribute to the gradient."""
        if has_covariances(logits):
            raise UnsupportedError(
                "TiltedBound() requires independent logits, but these have covariances. Use Sobol(64), leave out "
                "full_covariance=True, or use LastLayerGuide with PerOutput() (the default)"
            )
        mu, v = logits.loc, logits.variance
        a = self._tilt(mu.detach(), v.detach())
        return (0.5 * a.square() * v).sum(-1) + torch.logsumexp(mu + (0.5 - a) * v, -1)

    @torch.no_grad()
    def _tilt(self, mu: Tensor, v: Tensor) -> Tensor:
        """Return the optimal a, found with Newton's method; the Hessian is a diagonal plus a matrix of rank one."""
        a = torch.softmax(mu, -1)
        for _ in range(self.num_iterations):
            p = torch.softmax(mu + (0.5 - a) * v, -1)
            r, pv = a - p, p * v
            diagonal = 1 + pv
            s = (pv * r / diagonal).sum(-1, keepdim=True) / (p / diagonal).sum(-1, keepdim=True)
            a = (a - (r + p * s) / diagonal).clamp_(0, 1)
        return a


def cholesky_root(covariance: Tensor) -> Tensor:
    """Return a Cholesky factor of covariances, which may be singular."""
    diagonal = covariance.diagonal(dim1=-2, dim2=-1)
    info = torch.finfo(covariance.dtype)
    rounding = (4 * diagonal.shape[-1] * info.eps) * diagonal.amax(-1, keepdim=True) + info.tiny
    return torch.linalg.cholesky_ex(covariance + torch.diag_embed(rounding.expand_as(diagonal)))[0]
