# SPDX-License-Identifier: Apache-2.0
"""Sums and means over dimensions."""

from typing import Any

import torch

from pyro_dvi.moments.rules import moment_rule
from pyro_dvi.moments.value import GaussianMoments

__all__ = ["cumsum", "mean", "sum"]


@moment_rule(torch.sum)
def sum(input: GaussianMoments, *args: Any, **kwargs: Any) -> GaussianMoments:
    """Moments of a sum over dimensions.

    Status: exact for independent elements.
    """
    return GaussianMoments(torch.sum(input.loc, *args, **kwargs), torch.sum(input.variance, *args, **kwargs))


@moment_rule(torch.mean)
def mean(input: GaussianMoments, *args: Any, **kwargs: Any) -> GaussianMoments:
    """Moments of a mean over n elements, whose variance is their mean variance over n.

    Status: exact for independent elements. Those of a feature map share weights and are not: the variance of a global
    average pool is then too small.
    """
    loc = torch.mean(input.loc, *args, **kwargs)
    number = input.loc.numel() / max(loc.numel(), 1)
    return GaussianMoments(loc, torch.mean(input.variance, *args, **kwargs) / number)


@moment_rule(torch.cumsum)
def cumsum(input: GaussianMoments, *args: Any, **kwargs: Any) -> GaussianMoments:
    """Moments of running sums.

    Status: exact marginals for independent elements; the sums are correlated, which is dropped.
    """
    return GaussianMoments(
        torch.cumsum(input.loc, *args, **kwargs), torch.cumsum(input.variance, *args, **kwargs)
    )
