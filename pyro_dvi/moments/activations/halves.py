# SPDX-License-Identifier: Apache-2.0
"""Gated linear units: one half of the elements is multiplied by the sigmoid of the other."""

import torch
import torch.nn.functional as F

from pyro_dvi.moments.activations.sigmoidal import sigmoid
from pyro_dvi.moments.arithmetic import mul
from pyro_dvi.moments.rules import moment_rule
from pyro_dvi.moments.value import GaussianMoments

__all__ = ["glu"]


@moment_rule(F.glu)
def glu(input: GaussianMoments, dim: int = -1) -> GaussianMoments:
    r"""Moments of :math:`a\,\mathrm{sigmoid}(b)` for the halves a and b along a dimension.

    Status: exact for independent elements, as exact as :func:`~pyro_dvi.moments.activations.sigmoidal.sigmoid`.

    Example:
        >>> glu(GaussianMoments(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0])))
        GaussianMoments(loc=tensor([1.]), variance=tensor([0.2500]))
    """
    if input.shape[dim] % 2:
        raise ValueError(f"F.glu halves a dimension of even size, got {tuple(input.shape)} and dim={dim}")
    halves = zip(torch.chunk(input.loc, 2, dim), torch.chunk(input.variance, 2, dim), strict=True)
    values, gates = (GaussianMoments(loc, variance) for loc, variance in halves)
    return mul(values, sigmoid(gates))
