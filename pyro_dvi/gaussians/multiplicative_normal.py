# SPDX-License-Identifier: Apache-2.0
"""The Gaussian whose standard deviation is proportional to its mean, and its divergence from a Normal."""

from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints, register_kl

from pyro_dvi.core.choice import check_positive
from pyro_dvi.core.distributions import broadcasts_to
from pyro_dvi.errors import ArgumentError


class MultiplicativeNormal(dist.Normal):
    r"""Weights with multiplicative Gaussian noise.

    .. math:: w_{ij} \sim \mathcal N\bigl(m_{ij},\ \alpha_j m_{ij}^2 + \varepsilon\bigr)

    It is what becomes of a certain weight when its input j is multiplied by noise of mean 1 and variance
    :math:`\alpha_j`, if each product has noise of its own. The :math:`\varepsilon` keeps densities and gradients
    finite where a weight is zero. The paper has it inside the logarithm of the divergence only; as a part of the
    variance it adds the constant :math:`\varepsilon / 2 s^2` for each weight, and samples, densities and divergences
    agree.

    Status: exact.

    Args:
        loc: m, of any shape, floating point.
        alpha: relative variance, not negative, broadcastable to ``loc``; kept in the shape given.
        eps: :math:`\varepsilon`, in squared units of ``loc``; the paper's value by default, a deviation of 1e-5.

    Raises:
        ArgumentError: ``alpha`` does not broadcast to ``loc``, or ``eps`` is not positive.
        ValueError: a mean that is not finite or a negative ``alpha``, where Pyro's validation is on.

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

    # The standard deviation follows from these; the moments of a network never ask for it.
    arg_constraints = {"loc": constraints.real, "alpha": constraints.nonnegative}  # noqa: RUF012

    def __init__(
        self, loc: Tensor, alpha: Tensor, eps: float = 1e-10, validate_args: bool | None = None
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


@register_kl(MultiplicativeNormal, torch.distributions.Normal)  # type: ignore[untyped-decorator, unused-ignore]
def _elementwise_divergence(q: MultiplicativeNormal, prior: torch.distributions.Normal) -> Tensor:
    """Elements of the divergence, for Pyro's ``TraceMeanField_ELBO``."""
    variance, precision = q.variance, prior.scale.pow(-2)
    return 0.5 * ((variance + (q.loc - prior.loc).square()) * precision - 1 - (variance * precision).log())
