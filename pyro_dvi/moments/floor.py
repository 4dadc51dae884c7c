# SPDX-License-Identifier: Apache-2.0
"""The smallest variance that a nonlinearity sees."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from pyro_dvi.errors import ArgumentError

__all__ = ["floored", "raised", "tiny_variance", "variance_floor"]

_FLOOR: list[float] = []


@contextmanager
def variance_floor(minimum: float) -> Iterator[None]:
    r"""Raise the variance of what enters a nonlinearity to at least ``minimum``.

    The slopes of :math:`\mathrm E[f(x)]` in the variance grow as :math:`1/\sigma` where f has a kink. By default the
    floor is the square of the rounding error of the dtype, which changes no result.

    Raises:
        ArgumentError: a negative floor.
    """
    if minimum < 0:
        raise ArgumentError(f"a variance floor must not be negative, got {minimum}")
    _FLOOR.append(minimum)
    try:
        yield
    finally:
        _FLOOR.pop()


def floored(variance: Tensor) -> Tensor:
    """Return the variance, at least the floor."""
    tiny = tiny_variance(variance.dtype)
    return variance.clamp_min(max(_FLOOR[-1], tiny) if _FLOOR else tiny)


def raised(variance: Tensor) -> Tensor:
    """Return the variance, at least the floor if one was asked for: rules that see to zeros themselves start so."""
    return variance.clamp_min(_FLOOR[-1]) if _FLOOR else variance


def tiny_variance(dtype: torch.dtype) -> float:
    """Return the default floor."""
    return torch.finfo(dtype).eps ** 2
