# SPDX-License-Identifier: Apache-2.0
"""The Gaussian whose standard deviation is proportional to its mean, and its divergence from a Normal."""

from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributions import constraints, register_kl

from pyro_dvi.bayesian.placement import broadcasts_to
from pyro_dvi.choice import check_positive
from pyro_dvi.errors import ArgumentError

__all__ = ["MultiplicativeNormal", "divergence_from_normal", "squared_norm"]


class MultiplicativeNormal(dist.Normal):
    r"""Weights with multiplicative Gaussian noise.

    .. math:: w_{ij} \sim \mathcal N\bigl(m_{ij},\ \alpha_j m_{ij}^2 + \varepsilon\bigr)

    It is what becomes of a certain weight when its input j is multiplied by noise of mean 1 and variance
    :math:`\alpha_j`, if each product has noise of its own. The :math:`\varepsilon` keeps densities and gradients
    finite where a weight is zero.

    Status: exact.

    Args:
        loc: m, of any shape, floating point.
        alpha: relative variance, not negative, broadcastable to ``loc``; kept in the shape given.
        eps: :math:`\varepsilon`, in squared units of ``loc``.

    Raises:
        ArgumentError: ``alpha`` does not broadcast to ``loc``, or ``eps`` is not positive.
        ValueError: a mean that is not finite or a negative ``alpha``, where Pyro's validation is on.

    Source: Schmitt & Roth (2021), "Sampling-free variational inference for neural networks with multiplicative
    activation noise", Eq. 5.

    Example:
        >>> q = MultiplicativeNormal(torch.tensor([[1.0, -2.0], [0.0, 4.0]]), torch.tensor([[0.01, 0.25]]))
        >>> q.scale
        tensor([[1.0000e-01, 1.0000e+00],
                [1.0000e-04, 2.0000e+00]])
        >>> q.expand((3, 2, 2)).to_event(2).base_dist.alpha.shape
        torch.Size([1, 2])
    """

    # The standard deviation follows from these; the moments of a network never ask for it.
    arg_constraints = {"loc": constraints.real, "alpha": constraints.nonnegative}  # noqa: RUF012

    def __init__(
        self, loc: Tensor, alpha: Tensor, eps: float = 1e-8, validate_args: bool | None = None
    ) -> None:
        check_positive("eps", eps)
        if not broadcasts_to(alpha.shape, loc.shape):
            raise ArgumentError(
                f"alpha of shape {tuple(alpha.shape)} does not broadcast to means of shape {tuple(loc.shape)}: it "
                "has one entry per input unit, [1, in] for a weight [out, in]"
            )
        self.loc, self.alpha, self.eps = loc, alpha, float(eps)
        self._scale: Tensor | None = None
        torch.distributions.Distribution.__init__(self, loc.shape, validate_args=validate_args)

    @property
    def variance(self) -> Tensor:
        """Variances."""
        return self.alpha * self.loc.square() + self.eps

    @property
    def scale(self) -> Tensor:  # type: ignore[override]
        """Standard deviations, computed when first asked for."""
        if self._scale is None:
            self._scale = self.variance.sqrt()
        return self._scale

    def expand(self, batch_shape: Any, _instance: Any = None) -> "MultiplicativeNormal":
        """Return the distribution with its mean expanded; ``alpha`` stays as it is and broadcasts."""
        new = self._get_checked_instance(MultiplicativeNormal, _instance)
        batch_shape = torch.Size(batch_shape)
        new.loc, new.alpha, new.eps = self.loc.expand(batch_shape), self.alpha, self.eps
        new._scale = None if self._scale is None else self._scale.expand(batch_shape)
        torch.distributions.Distribution.__init__(new, batch_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new


def divergence_from_normal(q: MultiplicativeNormal, prior_loc: Tensor, prior_scale: Tensor) -> Tensor:
    r"""KL divergence of multiplicative noise from a Normal prior, summed over all weights.

    With :math:`v_{ij} = \alpha_j m_{ij}^2 + \varepsilon` and the prior :math:`\mathcal N(m_0, s^2)`,

    .. math::
        \sum_{ij} \tfrac12\Bigl(\frac{v_{ij} + (m_{ij} - m_0)^2}{s^2} - 1 - \log\frac{v_{ij}}{s^2}\Bigr).

    Status: exact. Gradients reach ``q`` only, once: they are written out to save passes over the weights.

    Args:
        q: the posterior.
        prior_loc: :math:`m_0`, a scalar or broadcastable to the weights.
        prior_scale: s likewise.

    Source: Schmitt & Roth (2021), Eq. 17, there for :math:`m_0 = 0`.

    Example:
        >>> q = MultiplicativeNormal(torch.tensor([[1.0, -2.0]]), torch.tensor([[0.01, 0.25]]))
        >>> prior = dist.Normal(0.0, 2.0).expand((1, 2))
        >>> divergence_from_normal(q, prior.loc[0, 0], prior.scale[0, 0])
        tensor(3.4401)
        >>> torch.distributions.kl_divergence(q, prior)  # element by element
        tensor([[2.6220, 0.8181]])
    """
    total: Tensor = _Divergence.apply(q.loc, q.alpha, q.eps, prior_loc, prior_scale)  # type: ignore[no-untyped-call]
    return total


@register_kl(MultiplicativeNormal, torch.distributions.Normal)  # type: ignore[untyped-decorator, unused-ignore]
def _elementwise_divergence(q: MultiplicativeNormal, prior: torch.distributions.Normal) -> Tensor:
    """Elements of the divergence, for Pyro's ``TraceMeanField_ELBO``."""
    variance, precision = q.variance, prior.scale.pow(-2)
    return 0.5 * ((variance + (q.loc - prior.loc).square()) * precision - 1 - (variance * precision).log())


class _Divergence(Function):
    """The sum, with its gradient written out."""

    @staticmethod
    def forward(
        ctx: Any, loc: Tensor, alpha: Tensor, eps: float, prior_loc: Tensor, prior_scale: Tensor
    ) -> Tensor:
        variance = (loc * alpha).mul_(loc).add_(eps)
        ctx.save_for_backward(loc, alpha, variance, prior_loc, prior_scale)
        shift = loc - prior_loc
        if prior_scale.dim() == 0:
            squares = (squared_norm(shift) + variance.sum()) / prior_scale.square()
        else:
            squares = squared_norm(shift.div_(prior_scale)) + (variance / prior_scale.square()).sum()
        log_ratio = torch.log(variance, out=shift).sum() - 2 * _sum_over(prior_scale.log(), loc)
        return 0.5 * (squares - loc.numel() - log_ratio)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        loc, alpha, variance, prior_loc, prior_scale = ctx.saved_tensors
        weight = out / prior_scale.square()
        pull = torch.div(-out, variance).add_(weight).mul_(loc)  # twice the slope in the variance, times m
        product = pull * loc
        d_alpha = product.sum_to_size(alpha.shape) * 0.5 if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, d_alpha, None, None, None
        return (
            torch.sub(loc, prior_loc, out=product).mul_(weight).addcmul_(pull, alpha),
            d_alpha,
            None,
            None,
            None,
        )


def squared_norm(x: Tensor) -> Tensor:
    """Sum of squares, by a product that needs no memory for them."""
    flat = x.reshape(-1)
    return torch.dot(flat, flat)


def _sum_over(parameter: Tensor, loc: Tensor) -> Tensor:
    """Sum of a parameter broadcast to the shape of the weights."""
    return parameter * loc.numel() if parameter.dim() == 0 else parameter.expand_as(loc).sum()
