# SPDX-License-Identifier: Apache-2.0
"""Reading and writing by index."""

from typing import Any

import torch

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments.rules import Kind, moment_rule
from pyro_dvi.moments.value import Moments, loc_of, variance_of

__all__ = ["getitem", "setitem"]


@moment_rule(torch.Tensor.__getitem__, kind=Kind.REARRANGEMENT)
def getitem(input: Any, index: Any) -> Moments:
    """Moments of ``x[index]``; a view where tensors give one (integers, slices, None, Ellipsis).

    Status: exact.
    """
    _check(index)
    part = Moments(input.loc[index], input.variance[index])
    return part.alias(input, index) if _is_basic(index) else part


@moment_rule(torch.Tensor.__setitem__)
def setitem(input: Any, index: Any, value: Any) -> None:
    """Write moments or numbers into moments. Views taken before cannot be used any more.

    Status: exact.
    """
    _check(index)
    if not isinstance(input, Moments):
        raise UnsupportedError(
            "moments are written into a tensor, which has no variance (x[index] = moments). Join the parts by "
            "torch.stack or torch.cat instead"
        )
    spread = variance_of(value)
    loc, variance = (x.clone() for x in input.before(index, value))
    loc[index] = loc_of(value)
    variance[index] = 0 if spread is None else spread
    input.become(Moments(loc, variance))


def _check(index: Any) -> None:
    for part in index if isinstance(index, tuple | list) else (index,):
        if isinstance(part, Moments):
            raise UnsupportedError("an index has to be certain: index by a tensor, such as x.loc.argmax()")


def _is_basic(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or type(part) in (int, slice) for part in parts)
