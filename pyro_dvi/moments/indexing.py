# SPDX-License-Identifier: Apache-2.0
"""Reading and writing by index."""

from typing import Any

import torch

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments.rules import Kind, moment_rule
from pyro_dvi.moments.value import GaussianMoments, loc_of, variance_of

__all__ = ["copy_", "fill_", "getitem", "setitem", "zero_"]


@moment_rule(torch.Tensor.__getitem__, kind=Kind.REARRANGEMENT)
def getitem(input: Any, index: Any) -> GaussianMoments:
    """Moments of ``x[index]``; a view where tensors give one (integers, slices, None, Ellipsis).

    Status: exact.
    """
    _check(index)
    part = GaussianMoments(input.loc[index], input.variance[index])
    return part.alias(input, index) if _is_basic(index) else part


@moment_rule(torch.Tensor.__setitem__)
def setitem(input: Any, index: Any, value: Any) -> None:
    """Write moments or numbers into moments. Views taken before cannot be used any more.

    Status: exact.
    """
    _check(index)
    if not isinstance(input, GaussianMoments):
        raise UnsupportedError(
            "moments are written into a tensor, which has no variance (x[index] = moments). Join the parts by "
            "torch.stack or torch.cat instead"
        )
    spread = variance_of(value)
    loc, variance = input.loc.clone(), input.variance.clone()
    loc[index] = loc_of(value)
    variance[index] = 0 if spread is None else spread
    input.become(GaussianMoments(loc, variance))


@moment_rule(torch.Tensor.copy_)
def copy_(input: Any, src: Any, non_blocking: bool = False) -> Any:
    """Overwrite moments by moments or certain numbers.

    Status: exact.
    """
    setitem(input, ..., src)
    return input


@moment_rule(torch.Tensor.fill_, torch.fill_)
def fill_(input: Any, value: Any) -> Any:
    """Overwrite moments by a certain number."""
    return copy_(input, value)


@moment_rule(torch.Tensor.zero_, torch.zero_)
def zero_(input: Any) -> Any:
    """Overwrite moments by zero, for certain."""
    return copy_(input, 0)


def _check(index: Any) -> None:
    for part in index if isinstance(index, tuple | list) else (index,):
        if isinstance(part, GaussianMoments):
            raise UnsupportedError("an index has to be certain: index by a tensor, such as x.loc.argmax()")


def _is_basic(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or type(part) in (int, slice) for part in parts)
