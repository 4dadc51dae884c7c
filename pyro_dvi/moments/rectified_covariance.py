# SPDX-License-Identifier: Apache-2.0
r"""Covariances between rectified Gaussians.

For x and y with means :math:`a\sigma_x, b\sigma_y` and correlation :math:`\rho`, Price's theorem gives
:math:`\partial\,\mathrm{Cov}[x_+, y_+]/\partial\,\mathrm{Cov}[x, y] = P(x > 0, y > 0)`, whose own derivative in
:math:`\rho` is the density at the origin. Hence, with :math:`r = \tanh t`,

.. math::
    \mathrm{Cov}[x_+, y_+] &= \mathrm{Cov}[x, y]\,\Phi(a)\Phi(b)
        + \frac{\sigma_x\sigma_y}{2\pi}\int_0^{\operatorname{artanh}\rho}(\rho - \tanh t)\,e(t)\,dt, \\
    P(x > 0, y > 0) &= \Phi(a)\Phi(b) + \frac{1}{2\pi}\int_0^{\operatorname{artanh}\rho} e(t)\,dt, \qquad
    e(t) = \frac{1}{\cosh t}\exp\Bigl(-\tfrac12(a - b)^2\cosh^2 t - \frac{ab}{1 + \tanh t}\Bigr).

No large terms cancel, and independent units have covariance zero. For negative correlations, b changes its sign. The
other slopes are Gaussian integrals that contain the same probability; with :math:`y \mid x = 0 \sim \mathcal N(m, w)`,

.. math::
    \frac{\partial}{\partial v_x} = \frac{\phi(a)}{2\sigma_x}\bigl(\mathrm E[y_+ \mid x = 0] - \mathrm E[y_+]\bigr),
    \qquad \frac{\partial}{\partial \mu_x} = \mathrm{Cov}\bigl[1_{x > 0}, y_+\bigr].

Status: computed by Gauss-Legendre quadrature. In units of :math:`\sigma_x\sigma_y`, covariances are exact to rounding
for correlations up to 0.9, and to 1e-8 (float64) or 1e-6 (float32) for all others, including 1 and -1. In the same two
cases, slopes are exact to rounding, and to 1e-5 (float64) or 1e-3 (float32).

Source: Price (1958), "A useful theorem for nonlinear devices having Gaussian inputs"; Plackett (1954), "A reduction
formula for normal multivariate integrals". Wu et al. (2019) approximate the same covariance.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pyro_dvi.moments.quadrature import DENSITY, distribution, gauss_legendre
from pyro_dvi.moments.value import tiny_variance

_FAR = 12.0  # standard deviations from the kink beyond which a unit is on or off: a probability of 2e-33
# The largest artanh of a correlation, and nodes, in float64 and float32.
_RANGES = (12.0, gauss_legendre(32)), (8.0, gauss_legendre(20))


def rectified_covariance(mu: Tensor, variance: Tensor, covariance: Tensor) -> Tensor:
    r"""Return :math:`\mathrm{Cov}[\mathrm{relu}(x_i), \mathrm{relu}(x_j)]` for :math:`i \ne j`.

    Args:
        mu: means ``[*, n]``.
        variance: of the same shape.
        covariance: ``[*, n, n]``; its diagonal is ignored, and the diagonal of the result has no meaning.

    Example:
        >>> rectified_covariance(torch.zeros(2), torch.ones(2), torch.full((2, 2), 0.5))[0, 1]
        tensor(0.1453)
    """
    found: Tensor = _RectifiedCovariance.apply(mu, variance, covariance)
    return found


class _Pairs:
    """Standardised means of all pairs of units and their correlations."""

    def __init__(self, mu: Tensor, variance: Tensor, covariance: Tensor) -> None:
        self.inverse = variance.clamp_min(tiny_variance(variance.dtype)).rsqrt().unsqueeze(-1)
        self.sigma = variance.sqrt().unsqueeze(-1)
        self.a = (mu.unsqueeze(-1) * self.inverse).clamp(-_FAR, _FAR)
        self.b = self.a.mT
        self.p = distribution(self.a)
        # Rounding may move a correlation beyond ±1.
        self.rho = (covariance * (self.inverse * self.inverse.mT)).clamp(-1, 1)

    def integrals(self) -> tuple[Tensor, Tensor]:
        """Return both integrals, the second with the sign of the correlation."""
        reach, (nodes, weights) = _RANGES[self.a.dtype is not torch.float64]
        sign = torch.where(self.rho < 0, -1.0, 1.0).to(self.rho)
        r, b = self.rho.abs(), sign * self.b
        end = torch.atanh(r).clamp_max(reach)
        spread, product = 0.125 * (self.a - b).square(), 0.5 * (self.a * b)
        first, second = torch.zeros_like(r), torch.zeros_like(r)
        for (node,), (weight,) in zip(nodes, weights, strict=True):
            u = torch.exp(end * (-2 * node))
            more = 1 + u
            density = torch.exp(-(spread * more / u + product) * more) * u.sqrt() / more
            first.addcmul_(r - (1 - u) / more, density, value=weight)
            second.add_(density, alpha=weight)
        end = end / math.pi  # 2 / 2π
        return first.mul_(end), second.mul_(end * sign)


class _RectifiedCovariance(Function):
    @staticmethod
    def forward(ctx: Any, mu: Tensor, variance: Tensor, covariance: Tensor) -> Tensor:
        pairs = _Pairs(mu, variance, covariance)
        first, second = pairs.integrals()
        ctx.save_for_backward(mu, variance, covariance, second)
        return covariance * (pairs.p * pairs.p.mT) + pairs.sigma * pairs.sigma.mT * first

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mu, variance, covariance, excess = ctx.saved_tensors
        pairs = _Pairs(mu, variance, covariance)
        a, b, p, rho = pairs.a, pairs.b, pairs.p, pairs.rho
        s = ((1 - rho) * (1 + rho)).sqrt().clamp_min(torch.finfo(rho.dtype).eps)
        away = b - rho * a  # mean of the second given that the first is at its kink
        z = away / s
        given = distribution(z)
        density = DENSITY * torch.exp(-0.5 * a.square())
        rest = away * given + s * DENSITY * torch.exp(-0.5 * z.square()) - (b * p.mT + density.mT)
        by_variance = 0.5 * density * pairs.inverse * rest
        by_mu = b * excess + density.mT * (given.mT - p) + rho * density * given
        both = (g + g.mT) * pairs.sigma.mT
        return (both * by_mu).sum(-1), (both * by_variance).sum(-1), g * (p * p.mT + excess)
