# SPDX-License-Identifier: Apache-2.0
"""The smallest variance that a nonlinearity sees."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from pyro_dvi.errors import ArgumentError


class _Local(threading.local):
    """The floor of the thread that asked for it, None by default."""

    def __init__(self) -> None:
        self.floor: float | None = None


_LOCAL = _Local()


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
    before = _LOCAL.floor
    _LOCAL.floor = minimum
    try:
        yield
    finally:
        _LOCAL.floor = before


def floored(variance: Tensor) -> Tensor:
    """Return the variance, at least the floor."""
    tiny = tiny_variance(variance.dtype)
    floor = _LOCAL.floor
    return variance.clamp_min(tiny if floor is None else max(floor, tiny))


def raised(variance: Tensor) -> Tensor:
    """Return the variance, at least the floor if one was asked for: rules that see to zeros themselves start so."""
    floor = _LOCAL.floor
    return variance if floor is None else variance.clamp_min(floor)


def tiny_variance(dtype: torch.dtype) -> float:
    """Return the default floor."""
    return torch.finfo(dtype).eps ** 2
