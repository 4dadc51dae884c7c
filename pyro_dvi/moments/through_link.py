# SPDX-License-Identifier: Apache-2.0
r"""Moments of a function of what is itself a function of a Gaussian, :math:`f(g(z))`, by quadrature over z.

A scale ``(softplus(h) + eps).sqrt()`` is no function of a Gaussian that could be expanded around its mean: softplus(h)
may vary a lot, and yet be positive. The Gaussian behind it is known (:class:`~pyro_dvi.moments.Link`), and over that
the moments are an integral of something smooth.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from pyro_dvi.moments.activations.normal import gauss_hermite
from pyro_dvi.moments.floor import floored
from pyro_dvi.moments.value import GaussianMoments

_POINTS = gauss_hermite(32)


def through_link(x: GaussianMoments, function: Callable[[Tensor], Tensor]) -> GaussianMoments | None:
    r"""Return mean and variance of ``function(x)`` from the Gaussian behind x; None where x has no such Gaussian.

    Status: Gauss-Hermite with 32 nodes, exact to rounding for what is smooth on the scale of the Gaussian's deviation.

    Args:
        x: moments with a link, each of whose elements depends on one element of the Gaussian.
        function: of each element, defined for every value of the link.

    Example:
        >>> h = GaussianMoments(torch.zeros(1), torch.ones(1))
        >>> through_link(torch.exp(h), torch.log).variance
        tensor([1.0000])
    """
    link = x.link
    if link is None or not link.separate or (link.elementwise and link.inner.shape != x.shape):
        return None
    loc, scale = link.inner.loc, floored(link.inner.variance).sqrt()
    centre = function(link.function(loc))  # so that differences keep their digits
    first, second = torch.zeros_like(centre), torch.zeros_like(centre)
    for (node,), (weight,) in zip(*_POINTS, strict=True):
        shift = function(link.function(loc + node * scale)) - centre
        first, second = first + weight * shift, second + weight * shift.square()
    return GaussianMoments(centre + first, (second - first.square()).clamp_min(0))
