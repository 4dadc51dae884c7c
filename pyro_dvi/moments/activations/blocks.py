# SPDX-License-Identifier: Apache-2.0
"""Long formulas a block of elements at a time, so that what a block writes stays in the cache."""

from collections.abc import Callable

import torch
from torch import Tensor

from pyro_dvi.moments.activations.partials import Compute, Partials, Result

__all__ = ["in_blocks"]

_BLOCK = 1 << 14


def in_blocks(compute: Callable[[Tensor, Tensor, bool], list[Tensor]]) -> Compute:
    """Return what :func:`~pyro_dvi.moments.activations.partials.through` calls.

    Accelerators and compiled code get all elements at once.

    Args:
        compute: takes means and variances of one dimension, and whether slopes are needed; returns mean and variance,
            then the four slopes of :class:`~pyro_dvi.moments.activations.partials.Partials`.
    """

    def whole(mu: Tensor, variance: Tensor, slopes: bool) -> Result:
        shape = mu.shape
        mu, variance = mu.reshape(-1), variance.reshape(-1)
        if mu.numel() <= _BLOCK or mu.device.type != "cpu" or torch.compiler.is_compiling():
            parts = compute(mu, variance, slopes)
        else:
            pairs = zip(mu.split(_BLOCK), variance.split(_BLOCK), strict=True)
            pieces = [compute(m, v, slopes) for m, v in pairs]
            parts = [torch.cat(p) for p in zip(*pieces, strict=True)]
        mean, spread, *partials = (t.reshape(shape) for t in parts)
        return Result(mean, spread, Partials(*partials) if slopes else None)

    return whole
