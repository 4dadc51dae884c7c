# SPDX-License-Identifier: Apache-2.0
r"""Averages of softplus and of its derivatives over a Gaussian of any variance.

Softplus is split as :math:`\mathrm{sp}(h) = g(h) + r(h)`, where :math:`g(h) = h\Phi(h/s) + s\phi(h/s)`, a rectifier
blurred by a Gaussian of deviation s, has a closed-form average, and the even remainder r vanishes as
:math:`e^{-|h|}`. Hence one rule of equally spaced nodes serves all variances: spread over the Gaussian while that is
narrow, over r when it is wide.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.activations.normal import DENSITY, distribution
from pyro_dvi.moments.floor import floored

_S = 1.7  # the logistic density is about as wide as a Gaussian of this deviation
_NODES = 61
_WIDE = 2.25  # deviation above which the nodes stay where r is


def expected_softplus(h: GaussianMoments) -> Tensor:
    """Mean of ``log(1 + exp(h))`` for Gaussian h.

    Status: exact to 1e-10 (float64) for every mean and variance.

    Example:
        >>> expected_softplus(GaussianMoments(torch.zeros(1), torch.zeros(1)))
        tensor([0.6931])
    """
    result: Tensor = _ExpectedSoftplus.apply(h.loc, h.variance)
    return result


def expected_sigmoid(h: GaussianMoments) -> Tensor:
    """Mean of ``sigmoid(h)`` for Gaussian h, without history; the same status."""
    return _averages(h.loc.detach(), h.variance.detach())[1]


def logit_of_expected_sigmoid(h: GaussianMoments) -> Tensor:
    r"""Logit of the mean of ``sigmoid(h)`` for Gaussian h, without history; both tails keep their digits.

    Where the mean :math:`\mu` lies below :math:`-v/2`, :math:`\sigma(h) = e^h\sigma(-h)` moves the average to where it
    is not small:

    .. math:: \mathrm E_{\mathcal N(\mu, v)}[\sigma(h)] = e^{\mu + v/2}\,\mathrm E_{\mathcal N(\mu + v, v)}[\sigma(-h)].

    Status: the logarithms of both probabilities are exact to 1e-6 (float64), up to variances of several hundred.

    Example:
        >>> logit_of_expected_sigmoid(GaussianMoments(torch.tensor([-40.0]), torch.ones(1)))
        tensor([-39.5000])
    """
    return _log_expected_sigmoid(h.loc, h.variance) - _log_expected_sigmoid(-h.loc, h.variance)


def _log_expected_sigmoid(mu: Tensor, variance: Tensor) -> Tensor:
    exponent = (mu + variance / 2).clamp_max(0)
    average = expected_sigmoid(GaussianMoments(torch.where(exponent < 0, -(mu + variance), mu), variance))
    return exponent + average.clamp_min(torch.finfo(mu.dtype).tiny).log()


class _ExpectedSoftplus(Function):
    @staticmethod
    def forward(ctx: Any, mu: Tensor, variance: Tensor) -> Tensor:
        value, slope, half_curvature = _averages(mu, variance)
        ctx.save_for_backward(slope, half_curvature)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        slope, half_curvature = ctx.saved_tensors
        return g * slope, g * half_curvature


@torch.no_grad()
def _averages(mu: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """E[sp], E[sp'] and E[sp'']/2; the derivatives in mean and variance are the latter two (Price 1958)."""
    variance = floored(variance)
    sigma = variance.sqrt()
    wide = sigma > _WIDE
    step = (sigma / 3).clamp_max(_WIDE / 3)
    centre = torch.where(wide, torch.zeros_like(mu), mu)
    k = torch.arange(_NODES, dtype=mu.dtype, device=mu.device) - _NODES // 2
    h = torch.addcmul(centre, k.reshape(-1, *(1,) * mu.dim()), step)
    # (h - mu)/sigma, without cancellation where the nodes follow the mean
    z = torch.where(wide, (h - mu) / sigma, (k / 3).reshape(-1, *(1,) * mu.dim()))
    weight = (step / sigma) * DENSITY * torch.exp(-0.5 * z.square())
    tail, density = distribution(-h.abs() / _S), DENSITY * torch.exp(-0.5 * (h / _S).square())
    p = torch.sigmoid(-h.abs())  # of the smaller side
    r = torch.nn.functional.softplus(-h.abs()) - (_S * density - h.abs() * tail)
    r_slope = torch.sign(h) * (tail - p)
    r_curvature = p * (1 - p) - density / _S
    spread = (variance + _S**2).sqrt()
    cdf, phi = distribution(mu / spread), DENSITY * torch.exp(-0.5 * (mu / spread).square())
    return (
        mu * cdf + spread * phi + (weight * r).sum(0),
        cdf + (weight * r_slope).sum(0),
        0.5 * (phi / spread + (weight * r_curvature).sum(0)),
    )
