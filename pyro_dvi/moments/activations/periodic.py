# SPDX-License-Identifier: Apache-2.0
r"""Sine and cosine, in closed form.

.. math::
    \mathrm E[\sin x] = e^{-\sigma^2/2}\sin\mu, \qquad
    \mathrm{Var}[\sin x] = \tfrac12(1 - e^{-\sigma^2})\bigl((1 - e^{-\sigma^2}) + 2e^{-\sigma^2}\cos^2\mu\bigr),

and the same with sine and cosine exchanged: sums of what is not negative, so that no digits cancel.
"""

import torch
from torch import Tensor

from pyro_dvi.moments.rules import Kind, moment_rule
from pyro_dvi.moments.value import GaussianMoments

__all__ = ["cos", "sin"]


@moment_rule(torch.sin, kind=Kind.ELEMENTWISE)
def sin(input: GaussianMoments) -> GaussianMoments:
    """Moments of the sine.

    Status: exact for Gaussian x.

    Example:
        >>> sin(GaussianMoments(torch.zeros(1), torch.ones(1))).variance
        tensor([0.4323])
    """
    return _wave(torch.sin(input.loc), torch.cos(input.loc), input.variance)


@moment_rule(torch.cos, kind=Kind.ELEMENTWISE)
def cos(input: GaussianMoments) -> GaussianMoments:
    """Moments of the cosine. Status: exact, as :func:`sin`."""
    return _wave(torch.cos(input.loc), torch.sin(input.loc), input.variance)


def _wave(value: Tensor, other: Tensor, variance: Tensor) -> GaussianMoments:
    lost = -torch.expm1(-variance)
    return GaussianMoments(
        value * torch.exp(-0.5 * variance), 0.5 * lost * (lost + 2 * torch.exp(-variance) * other.square())
    )
