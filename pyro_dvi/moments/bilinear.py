# SPDX-License-Identifier: Apache-2.0
r"""Moments of functions that are linear in an input and linear in a weight: one formula for all layers.

For independent factors :math:`y = \sum_j w_j x_j` has

.. math::
    \mathrm E[y] = \sum_j \mathrm E[w_j]\mathrm E[x_j], \qquad
    \mathrm{Var}[y] = \sum_j \mathrm E[w_j]^2 \mathrm{Var}[x_j]
        + \mathrm{Var}[w_j]\bigl(\mathrm E[x_j]^2 + \mathrm{Var}[x_j]\bigr).

Both lines apply the same linear map to different arguments; in a convolutional layer, this map is a convolution.
Weights with multiplicative noise, :math:`\mathrm{Var}[w_j] = \alpha_j \mathrm E[w_j]^2`, need only one more application
of the map:

.. math::
    \mathrm{Var}[y] = \sum_j \mathrm E[w_j]^2
        \bigl(\alpha_j(\mathrm E[x_j]^2 + \mathrm{Var}[x_j]) + \mathrm{Var}[x_j]\bigr).

Status: exact for independent inputs and weights. Inputs of deeper layers are not independent, because they are computed
with the same weights; the method assumes that they are independent.

Source: Schmitt & Roth (2021), Eq. 9; Wu et al. (2019), "Deterministic variational inference".
"""

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.core.elementwise import Elementwise, fuses
from pyro_dvi.core.undisturbed import without_autocast
from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments.full_covariance import are_followed, full_product
from pyro_dvi.moments.shared_noise import JointMoments, joint_product
from pyro_dvi.moments.value import GaussianMoments, loc_of, variance_of


class MultiplicativeMoments(GaussianMoments):
    r"""Gaussian weights with multiplicative noise: :math:`\mathcal N(m, \alpha m^2)`.

    With such weights, linear functions of deterministic or uncertain inputs need one additional product instead of two.
    All other functions use the variance.

    Args:
        loc: m.
        alpha: relative variance, broadcastable to ``loc``.

    Source: Schmitt & Roth (2021), Eq. 5.
    """

    __slots__ = ("alpha",)

    def __init__(self, loc: Tensor, alpha: Tensor) -> None:
        super().__init__(loc, loc)
        self.alpha = alpha

    @property
    def variance(self) -> Tensor:
        """Variances, computed on first access."""
        if self._variance is self._loc:
            self._variance = self.loc * self.alpha * self.loc
        return self._variance

    def become(self, other: GaussianMoments) -> GaussianMoments:
        """Raise an error: weights cannot be changed in place."""
        raise UnsupportedError(
            "weights cannot be changed in place: use a function that returns a new tensor, as in w = f(w)"
        )


# Called as product(x, weight) or, with a bias, product(x, weight, bias).
Map = Callable[..., Tensor]


def bilinear_moments(
    product: Map, x: Any, weight: Any, alpha: Tensor | None = None, bias: Any = None
) -> GaussianMoments:
    """Moments of ``product(x, weight)`` or ``product(x, weight, bias)``, which is linear in x and linear in weight.

    Args:
        product: the linear map, called with means, variances or second moments.
        x: moments or a deterministic tensor.
        weight: likewise; at least one of the two must be uncertain.
        alpha: relative variance of the weight, in a shape that multiplies ``x``; given only if the weight is
            :class:`~pyro_dvi.moments.bilinear.MultiplicativeMoments` and all weights of an input have the same relative
            variance.
        bias: added to the product, deterministic or uncertain.

    Raises:
        UnsupportedError: if x and the weight are the same object.
    """
    if x is weight:
        raise UnsupportedError(
            "the product of uncertain x with itself has no rule: write x.square().sum() for a sum of squares"
        )
    if are_followed() or any(isinstance(factor, JointMoments) for factor in (x, weight, bias)):
        dependent = full_product if are_followed() else joint_product
        with without_autocast(weight.device):  # which loses covariances, and skips vmap of a bias
            return dependent(product, *_widened(x, weight, bias))
    noisy = alpha is not None and isinstance(weight, MultiplicativeMoments) and isinstance(x, GaussianMoments)
    variance = None if noisy else variance_of(weight)
    shift, spread = (() if bias is None else (bias,) for bias in (loc_of(bias), variance_of(bias)))
    mean, w, x_variance = loc_of(x), loc_of(weight), variance_of(x)
    inputs = second = None
    if noisy and fuses(mean, x_variance, alpha):
        mean, inputs = _NOISY(mean, x_variance, alpha)
    elif x_variance is not None and variance is not None and fuses(mean, x_variance):
        mean, x_variance, second = _SECOND(mean, x_variance)
    loc = product(mean, w, *shift)
    if x_variance is None:
        return GaussianMoments(loc, product(_square(mean, loc), variance, *spread))
    if variance is None:
        if inputs is None:
            inputs = _NOISY.plain(mean, x_variance, alpha) if noisy else x_variance
        return GaussianMoments(loc, product(inputs, _square(w, loc), *spread))
    second = _SECOND.plain(mean, x_variance) if second is None else second
    of_weights = product(second, variance, *spread)
    return GaussianMoments(loc, of_weights + product(x_variance, w * w))


def _widened(*factors: Any) -> list[Any]:
    """Return the arguments of a product in the widest floating-point dtype among them."""
    kinds = [f.dtype for f in factors if f is not None and f.is_floating_point()]
    wide = reduce(torch.promote_types, kinds)
    return [f.to(wide) if f is not None and f.dtype in kinds and f.dtype is not wide else f for f in factors]


def _square(certain: Tensor, like: Tensor) -> Tensor:
    """Return the square, computed in floating point so that small integers do not overflow."""
    certain = certain if certain.is_floating_point() else certain.to(like.dtype)
    return certain * certain


# The variance of x multiplied by noise of mean 1 and relative variance α, and the second moment of x. On a GPU, x goes
# through the kernels, which add their gradients of x to the gradient of E[y].
_NOISY = Elementwise(
    "noisy",
    "y",
    "y = alpha * (x * x + variance) + variance;",
    lambda x, variance, alpha: torch.addcmul(variance, alpha, torch.addcmul(variance, x, x)),
    Elementwise(
        "noisy_backward",
        "g_x, g_variance, g_alpha",
        "T g = g_y * alpha; g_x = g_mean + 2 * x * g; g_variance = g_y + g; g_alpha = g_y * (x * x + variance);",
        lambda g_mean, g_y, x, variance, alpha: (
            g_mean + 2 * x * (g_y * alpha),
            g_y + g_y * alpha,
            g_y * (x * x + variance),
        ),
    ),
    unchanged=1,
)
_SECOND = Elementwise(
    "second_moment",
    "y",
    "y = x * x + variance;",
    lambda x, variance: torch.addcmul(variance, x, x),
    Elementwise(
        "second_moment_backward",
        "g_x, g_v",
        "g_x = g_mean + 2 * x * g_y; g_v = g_variance + g_y;",
        lambda g_mean, g_variance, g_y, x, variance: (g_mean + 2 * x * g_y, g_variance + g_y),
    ),
    unchanged=2,
)
