# SPDX-License-Identifier: Apache-2.0
"""The diagonal of the Hessian, which need not be positive."""

import torch
from torch import Tensor

from pyro_dvi.core.arguments import check_count
from pyro_dvi.curvature.linearisation import Curvature, Linearisation, half_sum, sum_of
from pyro_dvi.curvature.products import batched_gradients
from pyro_dvi.errors import ArgumentError


class HessianDiagonal(Curvature):
    r"""Diagonal of the negative Hessian of the log-likelihood, raised where the variance would have no optimum.

    .. math::
        c_\lambda = \begin{cases} h_\lambda & h_\lambda > -\beta/s_\lambda^2 \\
            -m\,\beta/s_\lambda^2 & \text{otherwise} \end{cases} \qquad
        h_\lambda = -\partial^2_\lambda \sum_s \mathrm{scale}_s \log p_s(y_s \mid u)

    The objective has an optimum in the variance, :math:`\sigma_\lambda^2 = \beta/(\beta/s_\lambda^2 + h_\lambda)`, only
    for a positive denominator. On single minibatches, the denominator is often negative. This is harmless, because the
    margin m < 1 keeps the variance finite. If the denominator of a weight is negative in most steps, the weight has no
    optimal variance: use a positive curvature, such as :class:`Fisher`, or a narrower prior. If the prior is not
    Normal, negative h are replaced by zero.

    Status: with ``num_probes=None``, the exact second-order expansion of Eq. 20 wherever the optimum exists; this takes
    one Hessian column per weight, so it suits only small networks. With probes, h is Hutchinson's estimate, which is
    unbiased before negative values are replaced. Both require third derivatives.

    Args:
        num_probes: number of Rademacher probes of Hutchinson's estimator, or None for the exact diagonal.
        margin: m, in [0, 1).

    Source: Unlu & Aitchison (2021), Eqs. 20-24, "VL (H)"; Hutchinson (1989).

    Example:
        >>> HessianDiagonal(num_probes=4)
        HessianDiagonal(num_probes=4)
    """

    def __init__(self, num_probes: int | None = None, margin: float = 0.9) -> None:
        if num_probes is not None:
            check_count("num_probes", num_probes)
        if not 0 <= margin < 1:
            raise ArgumentError(f"margin must lie in [0, 1), got {margin}")
        self.num_probes = num_probes
        self.margin = margin

    def penalty(self, likelihood: Linearisation) -> Tensor:
        log_prob = sum_of([site.log_likelihood() for site in (*likelihood.sites, *likelihood.factors)])
        gradients = likelihood.gradients(log_prob)
        if self.num_probes is None:
            curvatures = [-_diagonal(g, u) for g, u in zip(gradients, likelihood.values, strict=True)]
        else:
            curvatures = self._hutchinson(gradients, likelihood)
        limits = likelihood.precision_limits()
        defined = [
            c.clamp(min=0) if limit is None else torch.where(c > -limit, c, -self.margin * limit.detach())
            for c, limit in zip(curvatures, limits, strict=True)
        ]
        return half_sum(likelihood.scales, defined)

    def _hutchinson(self, gradients: list[Tensor], likelihood: Linearisation) -> list[Tensor]:
        assert self.num_probes is not None
        totals = [torch.zeros_like(u) for u in likelihood.values]
        for _ in range(self.num_probes):
            probes = [torch.randint_like(u, 2).mul_(2).sub_(1) for u in likelihood.values]
            projected = sum_of([(g * v).sum() for g, v in zip(gradients, probes, strict=True)])
            products = likelihood.gradients(projected)
            totals = [t - v * hv for t, v, hv in zip(totals, probes, products, strict=True)]
        return [t / self.num_probes for t in totals]

    def __repr__(self) -> str:
        return f"HessianDiagonal({'' if self.num_probes is None else f'num_probes={self.num_probes}'})"


def _diagonal(gradient: Tensor, value: Tensor) -> Tensor:
    """Return the exact diagonal of the Jacobian of ``gradient`` with respect to ``value``, differentiable."""
    flat = gradient.reshape(-1)
    if not flat.requires_grad:
        return torch.zeros_like(value)
    (rows,) = batched_gradients(flat, [value], torch.eye(flat.numel()).to(flat), 64, create_graph=True)
    return rows.reshape(len(rows), -1).diagonal().reshape(value.shape)
