# SPDX-License-Identifier: Apache-2.0
"""Normal weights that share one variance, which takes its optimal value given their posterior."""

import math
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions.util import sum_rightmost
from torch import Tensor
from torch.distributions import constraints


class OptimalScaleNormal(dist.TorchDistribution):
    r"""Normal weights that share one variance, which has an inverse-Gamma prior and takes its optimal value.

    .. math:: w_i \mid s^2 \sim \mathcal N(0, s^2), \qquad s^2 \sim \mathrm{InvGamma}(\alpha, \beta)

    For n weights with a Gaussian posterior of means :math:`\mu` and standard deviations :math:`\sigma`, the expected
    log joint density of weights and variance is

    .. math::
        \mathrm E_q[\log p(w, s^2)] = \log\frac{\beta^\alpha}{\Gamma(\alpha)} - \frac n2\log 2\pi
            - c\log s^2 - \frac{S + 2\beta}{2 s^2}, \qquad
        S = \sum_i \mu_i^2 + \sigma_i^2, \quad c = \frac n2 + \alpha + 1.

    This expectation is largest at

    .. math:: s_*^2 = \frac{S + 2\beta}{n + 2\alpha + 2}, \qquad \text{where } \frac{S + 2\beta}{2 s_*^2} = c.

    Draws are from the joint prior. ``log_prob`` is the case :math:`\mu = w, \sigma = 0`: the joint density of the
    weights and their optimal variance, which does not integrate to one over the weights.

    Status: exact.

    Args:
        alpha: :math:`\alpha`, positive, of the batch shape.
        beta: :math:`\beta`, in squared units of the weights, likewise.
        event_shape: shape of the weights that share a variance.

    Source: Wu et al. (2019), "Deterministic variational inference for robust Bayesian neural networks".

    Example:
        >>> prior = OptimalScaleNormal(torch.tensor(1.0), torch.tensor(2.0), (2, 3))
        >>> prior.optimal_variance(torch.ones(2, 3), torch.zeros(2, 3))  # (6 + 4) / (6 + 2 + 2)
        tensor(1.)
    """

    arg_constraints = {"alpha": constraints.positive, "beta": constraints.positive}  # noqa: RUF012
    has_rsample = True

    def __init__(
        self, alpha: Tensor, beta: Tensor, event_shape: Any, validate_args: bool | None = None
    ) -> None:
        self.alpha, self.beta = torch.broadcast_tensors(alpha, beta)
        super().__init__(self.alpha.shape, torch.Size(event_shape), validate_args=validate_args)

    @constraints.dependent_property
    def support(self) -> Any:
        """All real numbers."""
        return constraints.independent(constraints.real, self.event_dim)

    @property
    def scale(self) -> Tensor:
        """Most probable prior standard deviation of a weight, of the shape of the weights."""
        return self._over_weights(self.beta / (self.alpha + 1)).sqrt().expand(self.shape())

    def optimal_variance(self, loc: Tensor, scale: Tensor) -> Tensor:
        """Return the optimal variance, of the batch shape, given the posterior means and standard deviations."""
        squares = sum_rightmost(loc.square() + scale.square(), self.event_dim)
        return (squares + 2 * self.beta) / (self.event_shape.numel() + 2 * self.alpha + 2)

    def expected_log_prob(self, loc: Tensor, scale: Tensor) -> Tensor:
        """Return the expected log joint density at the optimal variance, of the batch shape."""
        count = self.event_shape.numel() / 2
        hyperprior = self.alpha * self.beta.log() - torch.lgamma(self.alpha)
        variance = self.optimal_variance(loc, scale)
        return hyperprior - count * math.log(2 * math.pi) - (count + self.alpha + 1) * (variance.log() + 1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log joint density of weights and their optimal variance."""
        return self.expected_log_prob(value, torch.zeros_like(value))

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:  # noqa: B008 (as torch's)
        """Draw a variance, then weights."""
        variance = dist.InverseGamma(self.alpha, self.beta).rsample(torch.Size(sample_shape))
        noise = torch.randn(self.shape(sample_shape), dtype=variance.dtype, device=variance.device)
        return self._over_weights(variance).sqrt() * noise

    def expand(self, batch_shape: Any, _instance: Any = None) -> "OptimalScaleNormal":
        """Return independent tensors of weights, each with a variance of its own."""
        alpha, beta = self.alpha.expand(batch_shape), self.beta.expand(batch_shape)
        return OptimalScaleNormal(alpha, beta, self.event_shape, validate_args=False)

    def _over_weights(self, variance: Tensor) -> Tensor:
        return variance.reshape(*variance.shape, *[1] * self.event_dim)
