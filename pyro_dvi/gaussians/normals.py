# SPDX-License-Identifier: Apache-2.0
r"""Gaussian vectors with covariances, and the Gaussian whose standard deviation is proportional to its mean.

Vectors have the form :math:`w_i = \bar w_i + \sum_r F_{ri}\,\epsilon_r + \sqrt{d_i}\,\delta_i` with standard Gaussian
:math:`\epsilon, \delta`: dense, low-rank, or dense within each output of a layer, with a separate :math:`\epsilon` for
each output.
"""

import math
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch import distributions as td
from torch.distributions import constraints


class RowsNormal(dist.TorchDistribution):
    r"""Independent Gaussian rows, each with its own covariance, as one vector with permuted elements.

    .. math:: w = \bar w + \operatorname{order}(L_1\epsilon_1, \dots, L_m\epsilon_m)

    Args:
        loc: means ``[n]``, in the order of the vector.
        scale_tril: Cholesky factors ``[m, k, k]`` with mk = n.
        order: index into the concatenated rows for each element of the vector, ``[n]``.

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
    """Return whether a distribution is a Gaussian vector with covariances."""
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

    Added to the divergences of the marginals from independent priors, it gives the divergence of the vector.

    Status: exact.

    Example:
        >>> total_correlation(
        ...     dist.MultivariateNormal(torch.zeros(2), torch.tensor([[1.0, 0.6], [0.6, 1.0]]))
        ... )
        tensor(0.2231)
    """
    alone = fn.variance.log().sum() + fn.event_shape[0] * math.log(2 * math.pi * math.e)
    return 0.5 * alone - fn.entropy()


class MultiplicativeNormal(dist.Normal):
    r"""Weights with multiplicative Gaussian noise.

    .. math:: w_{ij} \sim \mathcal N\bigl(m_{ij},\ \alpha_j m_{ij}^2 + \varepsilon\bigr)

    A deterministic weight has this distribution when its input j is multiplied by noise of mean 1 and variance
    :math:`\alpha_j`, drawn independently for each product. The :math:`\varepsilon` keeps densities and gradients finite
    if a weight is zero. In the paper, it appears only inside the logarithm of the divergence; as a part of the
    variance, it adds the constant :math:`\varepsilon / 2 s^2` per weight and makes samples, densities and divergences
    consistent.

    Status: exact.

    Args:
        loc: m, of any shape, floating point.
        alpha: nonnegative relative variance, broadcastable to ``loc``; its shape is kept.
        eps: :math:`\varepsilon`, in squared units of ``loc``; by default the paper's value, a standard deviation of
            1e-5.

    Raises:
        ValueError: if a mean is not finite or ``alpha`` is negative, and Pyro's validation is enabled.

    Source: Schmitt & Roth (2021), "Sampling-free variational inference for neural networks with multiplicative
    activation noise", Eq. 5, and Appendix A for :math:`\varepsilon`.

    Example:
        >>> q = MultiplicativeNormal(
        ...     torch.tensor([[1.0, -2.0], [0.0, 4.0]]), torch.tensor([[0.01, 0.25]])
        ... )
        >>> q.scale
        tensor([[1.0000e-01, 1.0000e+00],
                [1.0000e-05, 2.0000e+00]])
        >>> q.expand((3, 2, 2)).to_event(2).base_dist.alpha.shape
        torch.Size([1, 2])
    """

    # The standard deviation follows from these; the moments of a network never need it.
    arg_constraints = {"loc": constraints.real, "alpha": constraints.nonnegative}  # noqa: RUF012

    def __init__(
        self, loc: Tensor, alpha: Tensor, eps: float = 1e-10, validate_args: bool | None = None
    ) -> None:
        self.loc, self.alpha, self.eps = loc, alpha, float(eps)
        torch.distributions.Distribution.__init__(self, loc.shape, validate_args=validate_args)

    @property
    def variance(self) -> Tensor:
        """Variances."""
        return self.alpha * self.loc.square() + self.eps

    @property
    def scale(self) -> Tensor:  # type: ignore[override]
        """Standard deviations."""
        return self.variance.sqrt()

    def expand(self, batch_shape: Any, _instance: Any = None) -> "MultiplicativeNormal":
        """Return the distribution with an expanded mean; ``alpha`` keeps its shape and broadcasts."""
        new = self._get_checked_instance(MultiplicativeNormal, _instance)
        batch_shape = torch.Size(batch_shape)
        new.loc, new.alpha, new.eps = self.loc.expand(batch_shape), self.alpha, self.eps
        torch.distributions.Distribution.__init__(new, batch_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new
