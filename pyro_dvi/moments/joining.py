# SPDX-License-Identifier: Apache-2.0
"""Moments and tensors put together: ``cat``, ``stack`` and their kin."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments.rules import moment_rule
from pyro_dvi.moments.value import GaussianMoments, loc_of

__all__ = ["joined"]

_JOINING: tuple[Callable, ...] = (
    torch.cat,
    torch.concat,
    torch.concatenate,
    torch.stack,
    torch.hstack,
    torch.vstack,
    torch.dstack,
    torch.column_stack,
    torch.row_stack,
)


def joined(function: Callable, tensors: Sequence[Any], *args: Any, **kwargs: Any) -> GaussianMoments:
    """Join means with means and variances with variances; what is certain has variance zero.

    Status: exact.
    """
    if kwargs.pop("out", None) is not None:
        raise UnsupportedError(
            f"torch.{function.__name__}(out=...) cannot write moments into a tensor: drop out="
        )
    variances = [t.variance if isinstance(t, GaussianMoments) else torch.zeros_like(t) for t in tensors]
    loc = function([loc_of(t) for t in tensors], *args, **kwargs)
    return GaussianMoments(loc, function(variances, *args, **kwargs))


def _joining(function: Callable) -> Callable:
    def join(tensors: Sequence[Any], *args: Any, **kwargs: Any) -> GaussianMoments:
        return joined(function, tensors, *args, **kwargs)

    join.__doc__ = f"Moments of ``{function.__name__}`` of moments and tensors."
    return join


for _function in _JOINING:
    moment_rule(_function)(_joining(_function))
