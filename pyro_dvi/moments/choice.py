# SPDX-License-Identifier: Apache-2.0
"""Choices between elements."""

from typing import Any

import torch
from torch import Tensor

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments.rules import Kind, moment_rule
from pyro_dvi.moments.value import GaussianMoments, loc_of

__all__ = ["masked_fill", "where"]


@moment_rule(torch.masked_fill, kind=Kind.AFFINE)
def masked_fill(input: Any, mask: Tensor, value: Any) -> GaussianMoments:
    """GaussianMoments where the mask is False, and a certain value where it is True."""
    if isinstance(mask, GaussianMoments) or isinstance(value, GaussianMoments):
        raise UnsupportedError(
            "masked_fill takes a mask and a value that are certain: pass tensors, such as x.loc"
        )
    return GaussianMoments(input.loc.masked_fill(mask, value), input.variance.masked_fill(mask, 0))


@moment_rule(torch.where, kind=Kind.AFFINE)
def where(condition: Any, input: Any = None, other: Any = None) -> GaussianMoments:
    """GaussianMoments chosen element by element by a certain condition."""
    if isinstance(condition, GaussianMoments) or input is None or other is None:
        raise UnsupportedError("torch.where takes a condition that is certain, and two things to choose from")
    loc = torch.where(condition, loc_of(input), loc_of(other))
    zero = loc.new_zeros(())
    first, second = (
        x.variance.to(loc.dtype) if isinstance(x, GaussianMoments) else zero for x in (input, other)
    )
    return GaussianMoments(loc, torch.where(condition, first, second))


@moment_rule(torch.Tensor.where, kind=Kind.AFFINE)
def where_method(input: Any, condition: Any, other: Any) -> GaussianMoments:
    """Moments of ``x.where(condition, other)``, whose arguments come in another order."""
    return where(condition, input, other)
