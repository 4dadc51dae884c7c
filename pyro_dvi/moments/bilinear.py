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

Source: Schmitt & Roth (2021), Eq. 9 and 17; Wu et al. (2019), "Deterministic variational inference".
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from pyro_dvi.moments.square import noisy_input, second_moment, squared
from pyro_dvi.moments.value import GaussianMoments, MultiplicativeMoments, loc_of, variance_of

__all__ = ["bilinear_moments", "with_bias"]

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
    """
    shift = () if bias is None else (loc_of(bias),)
    spread = (bias.variance,) if isinstance(bias, GaussianMoments) else ()
    loc = product(loc_of(x), loc_of(weight), *shift)
    if not isinstance(weight, GaussianMoments):
        return GaussianMoments(loc, product(x.variance, _square(weight, loc), *spread))
    if alpha is not None and isinstance(weight, MultiplicativeMoments) and isinstance(x, GaussianMoments):
        noisy = noisy_input(x.loc, x.variance, alpha)
        return GaussianMoments(loc, product(noisy, weight.squared_loc, *spread))
    # Certain inputs need one product in any case, and this one no gradient of the inputs.
    if not isinstance(x, GaussianMoments):
        return GaussianMoments(loc, product(_square(x, loc), weight.variance, *spread))
    variance = product(second_moment(x.loc, x.variance), weight.variance, *spread)
    return GaussianMoments(loc, variance + product(x.variance, squared(weight.loc)))


def _square(certain: Tensor, like: Tensor) -> Tensor:
    """Return the square; that of small integers would overflow."""
    return (certain if certain.is_floating_point() else certain.to(like.dtype)).square()


def with_bias(y: GaussianMoments, bias: Any) -> GaussianMoments:
    """Add a bias that broadcasts against the result, certain or not."""
    if bias is None:
        return y
    spread = variance_of(bias)
    return GaussianMoments(y.loc + loc_of(bias), y.variance if spread is None else y.variance + spread)
