# SPDX-License-Identifier: Apache-2.0
r"""Gaussian vectors with covariances: dense, of low rank, or dense within each output of a layer.

All have the form :math:`w_i = \bar w_i + \sum_r F_{ri}\,\epsilon_r + \sqrt{d_i}\,\delta_i` with standard Gaussian
:math:`\epsilon, \delta`, where :math:`\epsilon` may be another one for each output.
"""

import math
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch import distributions as td
from torch.distributions import constraints


class RowsNormal(dist.TorchDistribution):
    r"""Independent Gaussian rows with a covariance each, as one vector whose elements may be in another order.

    .. math:: w = \bar w + \operatorname{order}(L_1\epsilon_1, \dots, L_m\epsilon_m)

    Args:
        loc: means ``[n]``, in the order of the vector.
        scale_tril: Cholesky factors ``[m, k, k]`` with mk = n.
        order: where each element of the vector is among the rows, ``[n]``.

    Example:
        >>> rows = RowsNormal(
        ...     torch.zeros(2), 2 * torch.eye(1).expand(2, 1, 1), torch.tensor([1, 0])
        ... )
        >>> rows.variance
        tensor([4., 4.])
    """

    arg_constraints = {"loc": constraints.real_vector}  # noqa: RUF012
    support = constraints.real_vector
    has_rsample = True

    def __init__(self, loc: Tensor, scale_tril: Tensor, order: Tensor) -> None:
        self.loc, self.scale_tril, self.order = loc, scale_tril, order
        super().__init__(torch.Size(), loc.shape, validate_args=False)

    @property
    def mean(self) -> Tensor:
        """Means."""
        return self.loc

    @property
    def variance(self) -> Tensor:
        """Variances."""
        return self.scale_tril.square().sum(-1).flatten()[self.order]

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:  # noqa: B008 (as torch's)
        """Draw vectors ``[*sample_shape, n]``."""
        noise = torch.randn(
            *sample_shape, *self.scale_tril.shape[:-1], 1, dtype=self.loc.dtype, device=self.loc.device
        )
        return self.loc + (self.scale_tril @ noise).flatten(-3)[..., self.order]

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of vectors ``[*, n]``."""
        rows = (value - self.loc)[..., self.order.argsort()].unflatten(-1, self.scale_tril.shape[:2])
        zeros = rows.new_zeros(rows.shape[-1])
        return td.MultivariateNormal(zeros, scale_tril=self.scale_tril).log_prob(rows).sum(-1)

    def entropy(self) -> Tensor:
        """Entropy of the vector."""
        diagonal = self.scale_tril.diagonal(dim1=-2, dim2=-1)
        return diagonal.log().sum() + 0.5 * len(self.loc) * math.log(2 * math.pi * math.e)


def is_joint(fn: Any) -> bool:
    """Whether a distribution is a Gaussian vector with covariances."""
    known = isinstance(fn, td.MultivariateNormal | td.LowRankMultivariateNormal | RowsNormal)
    return known and not fn.batch_shape


def shared_factor(fn: Any) -> tuple[Tensor, Tensor | None, bool]:
    r"""Return F ``[R, n]``, d ``[n]`` (None for zeros), and whether outputs of a layer share :math:`\epsilon`."""
    if isinstance(fn, RowsNormal):
        return fn.scale_tril.flatten(0, 1)[fn.order].mT, None, len(fn.scale_tril) == 1
    if isinstance(fn, td.LowRankMultivariateNormal):
        return fn.cov_factor.mT, fn.cov_diag, True
    return fn.scale_tril.mT, None, True


def total_correlation(fn: Any) -> Tensor:
    r"""KL divergence of a Gaussian vector from the product of its marginals.

    .. math:: \sum_i \log\sigma_i - \tfrac12\log\det\Sigma

    Added to the divergences of the marginals from priors that are independent, it gives that of the vector.

    Status: exact.

    Example:
        >>> total_correlation(
        ...     dist.MultivariateNormal(torch.zeros(2), torch.tensor([[1.0, 0.6], [0.6, 1.0]]))
        ... )
        tensor(0.2231)
    """
    alone = fn.variance.log().sum() + fn.event_shape[0] * math.log(2 * math.pi * math.e)
    return 0.5 * alone - fn.entropy()
