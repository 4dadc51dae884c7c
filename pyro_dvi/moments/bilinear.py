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

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments.full_covariance import are_followed, full_product
from pyro_dvi.moments.shared_noise import JointMoments, joint_product
from pyro_dvi.moments.value import GaussianMoments, loc_of, variance_of


class MultiplicativeMoments(GaussianMoments):
    r"""Gaussian weights whose noise multiplies them: :math:`\mathcal N(m, \alpha m^2)`.

    Linear functions of certain or uncertain inputs then need one more product instead of two. Everything else uses the
    variance.

    Args:
        loc: m.
        alpha: relative variance, broadcastable to ``loc``.

    Source: Schmitt & Roth (2021), Eq. 5.
    """

    __slots__ = ("_alpha",)

    def __init__(self, loc: Tensor, alpha: Tensor) -> None:
        super().__init__(loc, loc)
        self._alpha = alpha

    @property
    def alpha(self) -> Tensor:
        """Relative variance."""
        return self._alpha

    @property
    def variance(self) -> Tensor:
        """Variances, computed when first asked for."""
        if self._variance is self._loc:
            self._variance = self.loc * self.alpha * self.loc
        return self._variance

    def become(self, other: GaussianMoments) -> GaussianMoments:
        """Refuse to change weights."""
        raise UnsupportedError(
            "a weight is changed in place: write w = f(w) with the function that returns a new tensor"
        )


# Called as product(x, weight) or, where there is a bias, product(x, weight, bias).
Map = Callable[..., Tensor]
Gradients = tuple[Tensor | None, ...]


class Layer(ABC):
    """A map that knows its gradients, so that both moments are one function for autograd.

    Args:
        function: the map.
    """

    of_rows = False  # True where the last dimension counts units, and each unit has weights of its own

    def __init__(self, function: Map) -> None:
        self.function = function

    def __call__(self, *factors: Tensor) -> Tensor:
        """Return the product, plus the bias."""
        return self.function(*factors)

    @abstractmethod
    def gradients(self, g: Tensor, x: Tensor, weight: Tensor, wanted: tuple) -> Gradients:
        """Return new tensors: for a gradient g in the output those in x, weight and bias, each None if not wanted."""


def bilinear_moments(
    product: Map, x: Any, weight: Any, alpha: Tensor | None = None, bias: Any = None
) -> GaussianMoments:
    """Moments of ``product(x, weight)`` or ``product(x, weight, bias)``, linear in each of x and weight.

    Args:
        product: the linear map, called with means, variances or second moments. A :class:`Layer` costs fewer passes
            over memory, and keeps inputs and weights only for its gradients, but these have no derivatives.
        x: moments, or a tensor that is certain.
        weight: likewise; at least one of the two has to be uncertain.
        alpha: relative variance of the weight, of a shape that multiplies ``x``: only given where the noise of
            :class:`~pyro_dvi.moments.bilinear.MultiplicativeMoments` belongs to inputs.
        bias: added to the product, certain or not, at no extra cost in layers.

    Raises:
        UnsupportedError: x is the weight.
    """
    if x is weight:
        raise UnsupportedError(
            "the product of uncertain x with itself (as outer(x, x)) has no rule: x.square().sum() sums squares"
        )
    if are_followed():
        return full_product(product, x, weight, bias)
    if any(isinstance(factor, JointMoments) for factor in (x, weight, bias)):
        return joint_product(product, x, weight, bias)
    noisy = alpha is not None and isinstance(weight, MultiplicativeMoments) and isinstance(x, GaussianMoments)
    variance = None if noisy else variance_of(weight)
    factors = loc_of(x), variance_of(x), loc_of(weight), variance, alpha if noisy else None
    biases = loc_of(bias), variance_of(bias)
    if isinstance(product, Layer):
        # Autocast chooses dtypes inside the product, and does not do so for gradients; torch.func transforms operators.
        if not (torch.is_autocast_enabled(x.device.type) or torch._C._are_functorch_transforms_active()):
            return GaussianMoments(*_LayerMoments.apply(product, *factors, *biases))
        product = product.function
    return GaussianMoments(*_moments(product, factors, biases))


Factors = tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]


def _moments(
    product: Map, factors: Factors, biases: tuple[Tensor | None, Tensor | None]
) -> tuple[Tensor, Tensor]:
    """Return mean and variance of the product."""
    x, x_variance, weight, weight_variance, alpha = factors
    shift, spread = (() if bias is None else (bias,) for bias in biases)
    loc = product(x, weight, *shift)
    if x_variance is None:
        return loc, product(_square(x, loc), weight_variance, *spread)
    if weight_variance is None:
        return loc, product(_noisy(x, x_variance, alpha), _square(weight, loc), *spread)
    variance = product(torch.addcmul(x_variance, x, x), weight_variance, *spread)
    rest = product(x_variance, weight * weight)
    return loc, variance.add_(rest) if isinstance(product, Layer) else variance + rest


def _square(certain: Tensor, like: Tensor) -> Tensor:
    """Return the square, computed in floating point so that small integers do not overflow."""
    certain = certain if certain.is_floating_point() else certain.to(like.dtype)
    return certain * certain


def _noisy(x: Tensor, variance: Tensor, alpha: Tensor | None) -> Tensor:
    r"""Variance of x times noise of mean 1 and relative variance α, :math:`\alpha(m^2 + v) + v`."""
    if alpha is None:
        return variance
    moment = torch.addcmul(variance, x, x)
    # Fresh memory costs more than the sum: write over the moment if autograd allows.
    larger = (
        torch.broadcast_shapes(alpha.shape, moment.shape) != moment.shape
    )  # noise for each of a batch of nets
    return torch.addcmul(variance, alpha, moment, out=None if larger or torch.is_grad_enabled() else moment)


class _LayerMoments(Function):
    """Both moments of a layer. Squares are computed again for the gradients, since products cost far more."""

    @staticmethod
    def forward(ctx: Any, layer: Layer, *arguments: Any) -> tuple[Tensor, Tensor]:
        ctx.layer = layer
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*arguments[:5])
        return _moments(layer, arguments[:5], arguments[5:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor | None, h: Tensor | None) -> tuple[Tensor | None, ...]:
        x, v, weight, spread, alpha = ctx.saved_tensors
        _, for_x, for_v, for_weight, for_spread, for_alpha, for_bias, for_bias_variance = ctx.needs_input_grad
        gradients = ctx.layer.gradients
        in_x = in_v = in_weight = in_spread = in_alpha = in_bias = in_bias_variance = None
        if g is not None:
            in_x, in_weight, in_bias = gradients(g, x, weight, (for_x, for_weight, for_bias))
        if h is not None and spread is not None:
            moment = x * x if v is None else torch.addcmul(v, x, x)
            wanted = for_x or for_v, for_spread, for_bias_variance
            slope, in_spread, in_bias_variance = gradients(h, moment, spread, wanted)
            in_x = _plus_twice(in_x, x, slope) if for_x else None
            in_v = slope if for_v else None
            for_bias_variance = False
        if h is not None and v is not None:
            noisy = _noisy(x, v, alpha)
            wanted = for_v or for_alpha or (for_x and alpha is not None), for_weight, for_bias_variance
            slope, in_square, in_shift = gradients(h, noisy, weight * weight, wanted)
            in_bias_variance = in_shift if in_bias_variance is None else in_bias_variance
            in_weight = _plus_twice(in_weight, weight, in_square)
            if alpha is not None and slope is not None:
                slope, pull, in_alpha = _pulled_back(slope, x, v, alpha)
                in_x = _plus_twice(in_x, x, pull) if for_x else None
            in_v = slope if in_v is None or slope is None else slope.add_(in_v)
        return None, in_x, in_v, in_weight, in_spread, in_alpha, in_bias, in_bias_variance


def _pulled_back(slope: Tensor, x: Tensor, v: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of :func:`_noisy` in the variance, in the square of the mean, and in the noise."""
    moment = torch.addcmul(v, x, x)
    product = moment.mul_(slope) if slope.shape == x.shape else moment * slope
    in_alpha = product.sum_to_size(alpha.shape)
    pull = slope * alpha
    slope = slope.add_(pull)
    if slope.shape != x.shape:  # noise for each of a batch of nets, inputs for all
        slope, pull = slope.sum_to_size(x.shape), pull.sum_to_size(x.shape)
    return slope, pull, in_alpha


def _plus_twice(total: Tensor | None, a: Tensor, b: Tensor | None) -> Tensor | None:
    """Return total + 2ab, in the memory of ``total`` where there is one."""
    if b is None:
        return total
    return (b * a).mul_(2) if total is None else total.addcmul_(a, b, value=2)
