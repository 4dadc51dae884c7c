# SPDX-License-Identifier: Apache-2.0
"""Run a model only to look at it: no statistics are updated and no random numbers are used up."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["undisturbed"]


@contextmanager
def undisturbed(model: object) -> Iterator[None]:
    """Restore buffers, such as the statistics of BatchNorm, and the random state when the block ends.

    A model that Pyro runs in train mode to find its sites would otherwise advance its running statistics.

    Args:
        model: a module; for any other callable only the random state is restored.

    Example:
        >>> norm = nn.BatchNorm1d(2)
        >>> with undisturbed(norm):
        ...     _ = norm(torch.ones(3, 2))
        >>> norm.running_mean
        tensor([0., 0.])
    """
    buffers = list(model.buffers()) if isinstance(model, nn.Module) else []
    before = [buffer.detach().clone() for buffer in buffers]
    devices = sorted({buffer.device.index for buffer in buffers if buffer.is_cuda})
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in zip(buffers, before, strict=True):
                    buffer.copy_(value)
