# SPDX-License-Identifier: Apache-2.0
r"""Moments of anything that is linear in an input and linear in a weight: one formula for all layers.

For independent factors :math:`y = \sum_j w_j x_j` has

.. math::
    \mathrm E[y] = \sum_j \mathrm E[w_j]\mathrm E[x_j], \qquad
    \mathrm{Var}[y] = \sum_j \mathrm E[w_j]^2 \mathrm{Var}[x_j]
        + \mathrm{Var}[w_j]\bigl(\mathrm E[x_j]^2 + \mathrm{Var}[x_j]\bigr).

Both lines are the same linear map with other numbers in it: the map of a convolution is a convolution. Weights with
multiplicative noise, :math:`\mathrm{Var}[w_j] = \alpha_j \mathrm E[w_j]^2`, need it only once more,

.. math::
    \mathrm{Var}[y] = \sum_j \mathrm E[w_j]^2
        \bigl(\alpha_j(\mathrm E[x_j]^2 + \mathrm{Var}[x_j]) + \mathrm{Var}[x_j]\bigr).

Status: exact for independent inputs and weights. Inputs of a deeper layer that share weights are not independent; that
is the assumption of the method.

Source: Schmitt & Roth (2021), Eq. 9; Wu et al. (2019), "Deterministic variational inference".
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments.value import GaussianMoments, loc_of

__all__ = ["MultiplicativeMoments", "bilinear_moments"]


class MultiplicativeMoments(GaussianMoments):
    r"""Gaussian weights whose noise multiplies them: :math:`\mathcal N(m, \alpha m^2)`.

    Linear functions of certain or uncertain inputs then need one more product instead of two. Everything else uses the
    variance.

    Args:
        loc: m.
        alpha: relative variance, broadcastable to ``loc``.

    Source: Schmitt & Roth (2021), Eq. 5.
    """

    __slots__ = ("_alpha", "_squared")

    def __init__(self, loc: Tensor, alpha: Tensor) -> None:
        super().__init__(loc, loc)
        self._alpha = alpha
        self._squared: Tensor | None = None

    @property
    def alpha(self) -> Tensor:
        """Relative variance."""
        return self._alpha

    @property
    def squared_loc(self) -> Tensor:
        """Squares of the means, computed once."""
        if self._squared is None:
            self._squared = _Square.apply(self.loc)
        return self._squared

    @property
    def variance(self) -> Tensor:
        """Variances."""
        if self._squared is None or self._variance is self._loc:
            self._variance = self.alpha * self.squared_loc
        return self._variance

    def become(self, other: GaussianMoments) -> GaussianMoments:
        """Refuse to change weights."""
        raise UnsupportedError(
            "a weight is changed in place, which would change the model for its next use: write w = f(w) with the "
            "function that returns a new tensor"
        )


# Called as product(x, weight) or, where there is a bias, product(x, weight, bias).
Map = Callable[..., Tensor]


def bilinear_moments(
    product: Map, x: Any, weight: Any, alpha: Tensor | None = None, bias: Any = None
) -> GaussianMoments:
    """Moments of ``product(x, weight)`` or ``product(x, weight, bias)``, linear in each of x and weight.

    Args:
        product: the linear map, called with means, variances or second moments.
        x: moments, or a tensor that is certain.
        weight: likewise; at least one of the two has to be uncertain.
        alpha: relative variance of the weight, of a shape that multiplies ``x``: only given where the noise of
            :class:`~pyro_dvi.moments.MultiplicativeMoments` belongs to inputs.
        bias: what the product adds at the end, certain or not. Layers add it on the way, at no cost.

    Raises:
        UnsupportedError: x is the weight.
    """
    if x is weight:
        raise UnsupportedError(
            "the product of uncertain x with itself (as x @ x, torch.outer(x, x)) has no rule: the factors are not "
            "independent. For a sum of squares write x.square().sum()."
        )
    shift = () if bias is None else (loc_of(bias),)
    spread = (bias.variance,) if isinstance(bias, GaussianMoments) else ()
    loc = product(loc_of(x), loc_of(weight), *shift)
    if not isinstance(weight, GaussianMoments):
        return GaussianMoments(loc, product(x.variance, _square(weight, loc), *spread))
    if alpha is not None and isinstance(weight, MultiplicativeMoments) and isinstance(x, GaussianMoments):
        noisy = _NoisyInput.apply(x.loc, x.variance, alpha)
        return GaussianMoments(loc, product(noisy, weight.squared_loc, *spread))
    # Certain inputs need one product in any case, and this one no gradient of the inputs.
    if not isinstance(x, GaussianMoments):
        return GaussianMoments(loc, product(_square(x, loc), weight.variance, *spread))
    variance = product(_SecondMoment.apply(x.loc, x.variance), weight.variance, *spread)
    return GaussianMoments(loc, variance + product(x.variance, _Square.apply(weight.loc)))


def _square(certain: Tensor, like: Tensor) -> Tensor:
    """Return the square; that of small integers would overflow."""
    return (certain if certain.is_floating_point() else certain.to(like.dtype)).square()


# Squares and second moments, in fewer passes over memory than autograd takes for the formulas.


def _twice(a: Tensor, b: Tensor) -> Tensor:
    """Return 2ab in one pass."""
    return torch.addcmul(a.new_zeros(()), a, b, value=2)


class _Square(Function):
    """The square."""

    @staticmethod
    def forward(ctx: Any, loc: Tensor) -> Tensor:
        ctx.save_for_backward(loc)
        return loc * loc

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return _twice(g, *ctx.saved_tensors)


class _SecondMoment(Function):
    r"""The second moment :math:`m^2 + v`."""

    @staticmethod
    def forward(ctx: Any, loc: Tensor, variance: Tensor) -> Tensor:
        ctx.save_for_backward(loc)
        return torch.addcmul(variance, loc, loc)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        return _twice(g, *ctx.saved_tensors), g


class _NoisyInput(Function):
    r"""Variance of x times noise of mean 1 and relative variance α, :math:`\alpha(m^2 + v) + v`."""

    @staticmethod
    def forward(ctx: Any, loc: Tensor, variance: Tensor, alpha: Tensor) -> Tensor:
        ctx.save_for_backward(loc, variance, alpha)
        return torch.addcmul(variance, alpha, torch.addcmul(variance, loc, loc))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        loc, variance, alpha = ctx.saved_tensors
        g_alpha = None
        if ctx.needs_input_grad[2]:
            moment = torch.addcmul(variance, loc, loc)
            moment = moment.mul_(g) if g.shape == loc.shape else moment * g
            g_alpha = moment.sum_to_size(alpha.shape)
        g_loc = g * (2 * alpha)
        g_variance = torch.add(g, g_loc, alpha=0.5)
        if g.shape != loc.shape:  # noise for each of a batch of nets, inputs for all
            g_loc, g_variance = g_loc.sum_to_size(loc.shape), g_variance.sum_to_size(loc.shape)
        return g_loc.mul_(loc), g_variance, g_alpha
