# SPDX-License-Identifier: Apache-2.0
r"""The larger of two, and the smooth maximum.

Both are a function of the difference added to one of two independent x and y,

.. math:: \max(x, y) = y + (x - y)_+, \qquad \log(e^x + e^y) = y + \mathrm{softplus}(x - y).

By Stein's lemma, with :math:`d = x - y`,

.. math:: \mathrm{Var}[y + f(d)] = \mathrm{Var}[f(d)] + \mathrm{Var}[y]\,(1 - 2\,\mathrm E[f'(d)]),

where y is the one with the smaller variance, so that no digits are lost.

Source: for the maximum, Clark (1961), "The greatest of a finite set of random variables".
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.moments.activations.normal import distribution
from pyro_dvi.moments.activations.rectified import relu
from pyro_dvi.moments.activations.sigmoidal import sigmoid, softplus
from pyro_dvi.moments.dispatch import Kind
from pyro_dvi.moments.floor import floored
from pyro_dvi.moments.rules import moment_rule
from pyro_dvi.moments.value import GaussianMoments, loc_of, variance_of


@moment_rule(torch.maximum, torch.fmax, kind=Kind.ELEMENTWISE)
def maximum(input: Any, other: Any) -> GaussianMoments:
    """Moments of the larger of two. Status: exact for independent Gaussians, and where one is certain.

    Example:
        >>> x, y = (GaussianMoments(torch.zeros(1), torch.ones(1)) for _ in range(2))
        >>> torch.maximum(x, y)
        GaussianMoments(loc=tensor([0.5642]), variance=tensor([0.6817]))
    """
    if input is other:
        return input.snapshot()
    return _above(input, other, relu, lambda d: distribution(d.loc * floored(d.variance).rsqrt()))


@moment_rule(torch.minimum, torch.fmin, kind=Kind.ELEMENTWISE)
def minimum(input: Any, other: Any) -> GaussianMoments:
    """Moments of the smaller of two. Status: that of :func:`maximum`."""
    return input.snapshot() if input is other else -maximum(-input, -other)


@moment_rule(torch.logaddexp, kind=Kind.ELEMENTWISE)
def logaddexp(input: Any, other: Any) -> GaussianMoments:
    r"""Moments of :math:`\log(e^x + e^y)`.

    Status: as exact as :func:`~pyro_dvi.moments.activations.sigmoidal.softplus` for independent Gaussians, and where
    one is certain.
    """
    if input is other:
        return input + math.log(2)
    return _above(input, other, softplus, lambda d: sigmoid(d).loc)


def _above(
    x: Any, y: Any, excess: Callable[..., GaussianMoments], slope: Callable[..., Tensor]
) -> GaussianMoments:
    """Moments of one plus a function of the difference, whose expected slope is given."""
    first, second = loc_of(x), loc_of(y)
    zero = torch.zeros_like(second if isinstance(y, GaussianMoments) else first)
    spreads = [zero if spread is None else spread for spread in (variance_of(x), variance_of(y))]
    swapped = spreads[0] < spreads[1]
    base, top = torch.where(swapped, first, second), torch.where(swapped, second, first)
    difference = GaussianMoments(top - base, spreads[0] + spreads[1])
    f, smaller = excess(difference), torch.minimum(*spreads)
    variance = torch.addcmul(f.variance + smaller, smaller, slope(difference), value=-2)
    return GaussianMoments(base + f.loc, variance.clamp_min(0))
