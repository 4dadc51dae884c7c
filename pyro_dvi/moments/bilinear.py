# SPDX-License-Identifier: Apache-2.0
r"""Moments of functions that are linear in an input and linear in a weight: one formula for all layers.

For independent factors :math:`y = \sum_j w_j x_j` has

.. math::
    \mathrm E[y] = \sum_j \mathrm E[w_j]\mathrm E[x_j], \qquad
    \mathrm{Var}[y] = \sum_j \mathrm E[w_j]^2 \mathrm{Var}[x_j]
        + \mathrm{Var}[w_j]\bigl(\mathrm E[x_j]^2 + \mathrm{Var}[x_j]\bigr).

Both lines apply the same linear map to different arguments: for a convolution, the map is a convolution. Weights with
multiplicative noise, :math:`\mathrm{Var}[w_j] = \alpha_j \mathrm E[w_j]^2`, need only one more application of the map:

.. math::
    \mathrm{Var}[y] = \sum_j \mathrm E[w_j]^2
        \bigl(\alpha_j(\mathrm E[x_j]^2 + \mathrm{Var}[x_j]) + \mathrm{Var}[x_j]\bigr).

Status: exact for independent inputs and weights. Inputs of deeper layers share weights and are not independent; the
method assumes that they are.

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
    r"""Gaussian weights with multiplicative noise: :math:`\mathcal N(m, \alpha m^2)`.

    Linear functions of deterministic or uncertain inputs then need one additional product instead of two. All other
    functions use the variance.

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
        """Variances, computed on first access."""
        if self._variance is self._loc:
            self._variance = self.loc * self.alpha * self.loc
        return self._variance

    def become(self, other: GaussianMoments) -> GaussianMoments:
        """Raise an error: weights cannot be changed in place."""
        raise UnsupportedError(
            "weights cannot be changed in place: use the function that returns a new tensor, w = f(w)"
        )


# Called as product(x, weight) or, with a bias, product(x, weight, bias).
Map = Callable[..., Tensor]
Gradients = tuple[Tensor | None, ...]


class Layer(ABC):
    """A bilinear map with its gradients, so that both moments form one autograd function.

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
        """Return new tensors: the gradients with respect to x, weight and bias given g, each None if not wanted."""


def bilinear_moments(
    product: Map, x: Any, weight: Any, alpha: Tensor | None = None, bias: Any = None
) -> GaussianMoments:
    """Moments of ``product(x, weight)`` or ``product(x, weight, bias)``, linear in each of x and weight.

    Args:
        product: the linear map, called with means, variances or second moments. A :class:`Layer` takes fewer passes
            over memory and saves only inputs and weights for its gradients, but has no second derivatives.
        x: moments or a deterministic tensor.
        weight: likewise; at least one of the two must be uncertain.
        alpha: relative variance of the weight, in a shape that multiplies ``x``; given only if the noise of
            :class:`~pyro_dvi.moments.bilinear.MultiplicativeMoments` belongs to inputs.
        bias: added to the product, deterministic or uncertain; at no extra cost in layers.

    Raises:
        UnsupportedError: if x and the weight are the same object.
    """
    if x is weight:
        raise UnsupportedError(
            "the product of uncertain x with itself has no rule: write x.square().sum() for a sum of squares"
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
        # Autocast chooses dtypes inside the product, but not for gradients; torch.func transforms operators.
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
    # Allocating memory costs more than the sum: overwrite the moment if autograd allows.
    larger = (
        torch.broadcast_shapes(alpha.shape, moment.shape) != moment.shape
    )  # noise for each of a batch of nets
    return torch.addcmul(variance, alpha, moment, out=None if larger or torch.is_grad_enabled() else moment)


class _LayerMoments(Function):
    """Both moments of a layer. Gradients recompute the squares, which cost far less than the products."""

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
    """Return the gradients of :func:`_noisy` with respect to variance, squared mean and noise."""
    moment = torch.addcmul(v, x, x)
    product = moment.mul_(slope) if slope.shape == x.shape else moment * slope
    in_alpha = product.sum_to_size(alpha.shape)
    pull = slope * alpha
    slope = slope.add_(pull)
    if slope.shape != x.shape:  # noise for each of a batch of nets, inputs for all
        slope, pull = slope.sum_to_size(x.shape), pull.sum_to_size(x.shape)
    return slope, pull, in_alpha


def _plus_twice(total: Tensor | None, a: Tensor, b: Tensor | None) -> Tensor | None:
    """Return total + 2ab, computed in place if ``total`` is given."""
    if b is None:
        return total
    return (b * a).mul_(2) if total is None else total.addcmul_(a, b, value=2)
