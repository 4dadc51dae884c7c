# SPDX-License-Identifier: Apache-2.0
"""Words between processes: whether there are others, and what each has to say."""

import os
from typing import Any, TypeVar

import torch.distributed as td

from pyro_dvi.errors import PyroDviError, UnsupportedError

__all__ = ["exchange", "several"]

T = TypeVar("T")


def several(group: Any) -> bool:
    """Whether there are other processes to talk to.

    Raises:
        UnsupportedError: torchrun has started several, which do not know each other.
    """
    if td.is_available() and td.is_initialized():
        return True
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UnsupportedError(
            f"this is one of {os.environ['WORLD_SIZE']} processes (WORLD_SIZE), but there is no process group: call "
            "torch.distributed.init_process_group() at the start of the script"
        )
    return False


def exchange(message: T, group: Any) -> list[T]:
    """Return the messages of all processes, in their order.

    Raises:
        PyroDviError: a process did not come, within the time that the process group allows.
    """
    messages: list[Any] = [None] * td.get_world_size(group)
    try:
        td.all_gather_object(messages, message, group=group)
    except RuntimeError as error:
        raise PyroDviError(
            f"process {td.get_rank(group)} waited for the others, but not all came: one has ended or failed, or has no "
            "batch left where this one has. Every process must take as many steps: give all as many batches, as "
            "torch's DistributedSampler does, or let DataParallel go on without those that have none, by for x, y in "
            f"JointBatches(loader, elbo). ({str(error).splitlines()[0]})"
        ) from error
    return messages
