# SPDX-License-Identifier: Apache-2.0
"""Words between processes: whether there are others, and what each has to say."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as td

from pyro_dvi.errors import PyroDviError, UnsupportedError

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


def exchange_results(work: Callable[[], T], group: Any, what: str = "") -> list[T]:
    """Let each process do some work by itself, and return the results of all, in their order.

    Raises:
        Exception: the work of this process failed.
        PyroDviError: that of another process failed.
    """
    result: Any = None
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:
        failure = error
    messages = exchange((result, failure and f"{type(failure).__name__}: {failure}"), group)
    if failure is not None:
        raise failure
    for k, (_, failed) in enumerate(messages):
        if failed is not None:
            raise PyroDviError(f"{what}process {k} failed: {failed}")
    return [other for other, _ in messages]
