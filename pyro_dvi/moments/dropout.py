# SPDX-License-Identifier: Apache-2.0
r"""Dropout: in training a multiplicative noise of known moments, else nothing.

With the mask :math:`b \sim \mathrm{Bernoulli}(1 - p)`, independent of x,

.. math:: \mathrm E\Bigl[\frac{b x}{1 - p}\Bigr] = m, \qquad \mathrm{Var} = \frac{v + p m^2}{1 - p}.

Status: exact marginals of mask and x together; no mask is drawn. Channels that drop out together are taken as
independent, as everything else.
"""

import math

import torch
import torch.nn.functional as F

from pyro_dvi.errors import ArgumentError
from pyro_dvi.moments.rules import moment_rule
from pyro_dvi.moments.value import GaussianMoments


@moment_rule(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)
def dropout(input: GaussianMoments, p: float = 0.5, training: bool = True) -> GaussianMoments:
    """Moments of dropout of elements or channels.

    Example:
        >>> F.dropout(GaussianMoments(torch.ones(1), torch.zeros(1)), 0.5)
        GaussianMoments(loc=tensor([1.]), variance=tensor([1.]))
    """
    if not 0 <= p <= 1:
        raise ArgumentError(f"the dropout probability has to be between 0 and 1, got {p}")
    if not training or p == 0:
        return input
    if p == 1:
        return GaussianMoments(torch.zeros_like(input.loc), torch.zeros_like(input.loc))
    odds = p / (1 - p)
    return GaussianMoments(input.loc, input.variance / (1 - p) + odds * input.loc.square())


@moment_rule(torch.dropout, torch.feature_dropout)
def torch_dropout(input: GaussianMoments, p: float, train: bool) -> GaussianMoments:
    """Moments of dropout under the name that torch gives it."""
    return dropout(input, p, train)


@moment_rule(F.alpha_dropout, F.feature_alpha_dropout)
def alpha_dropout(input: GaussianMoments, p: float = 0.5, training: bool = False) -> GaussianMoments:
    r"""Moments of :math:`a(b (x - s) + (1 - p)s)` with :math:`a^2 (1 - p)(1 + ps^2) = 1`, where s is the limit of SELU.

    .. math:: \mathrm E = a(1 - p)m, \qquad \mathrm{Var} = a^2 (1 - p)(v + p(m - s)^2)
    """
    limit = -1.7580993408473766
    shifted = GaussianMoments(input.loc - limit, input.variance)
    noisy = dropout(shifted, p, training)
    if noisy is shifted:
        return input
    scale = math.sqrt((1 - p) / (1 + p * limit**2))
    return GaussianMoments(scale * input.loc, scale**2 * noisy.variance)


@moment_rule(torch.alpha_dropout, torch.feature_alpha_dropout)
def torch_alpha_dropout(input: GaussianMoments, p: float, train: bool) -> GaussianMoments:
    """Moments of alpha dropout under the name that torch gives it."""
    return alpha_dropout(input, p, train)
