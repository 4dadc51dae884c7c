# SPDX-License-Identifier: Apache-2.0
"""Messages between the processes of a training run, and what a process reports if another one has failed or ended.

Each process leaves a note in the store of the process group that says why it sends no more messages.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as td
from torch import Tensor

from pyro_dvi.errors import PyroDviError, UnsupportedError

T = TypeVar("T")


def several(group: Any) -> bool:
    """Return True if there is a process group.

    Raises:
        UnsupportedError: if torchrun has started several processes, but there is no process group.
    """
    if td.is_available() and td.is_initialized():
        return True
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UnsupportedError(
            f"this is one of {os.environ['WORLD_SIZE']} processes, but there is no process group: call "
            "torch.distributed.init_process_group() at the start of the script"
        )
    return False


def messages_of_all(message: T, group: Any) -> list[T]:
    """Return the messages of all processes, in the order of the processes; only the own one without a process group.

    Raises:
        PyroDviError: if a process sends nothing within the timeout of the process group.
    """
    if not several(group):
        return [message]
    messages: list[Any] = [None] * td.get_world_size(group)
    try:
        td.all_gather_object(messages, message, group=group)
    except RuntimeError as error:
        raise PyroDviError(
            f"process {td.get_rank(group)} waited for the others, but {_reason(group)} "
            f"({str(error).splitlines()[0]}). All need the same number of batches, as with DistributedSampler"
        ) from error
    return messages


def leave_note(text: str) -> None:
    """Write what this process does where the others can read it, unless it has written something before."""
    with suppress(RuntimeError):  # the process that keeps the notes may have ended
        td.distributed_c10d._get_default_store().compare_set(f"pyro_dvi/{td.get_rank()}", "", text)


def take_back_note() -> None:
    """Remove the note of this process."""
    td.distributed_c10d._get_default_store().delete_key(f"pyro_dvi/{td.get_rank()}")


def _reason(group: Any) -> str:
    """Return why other processes send no messages: their errors, or that they do not wait for messages."""
    leave_note("waits")
    notes = []
    for k, rank in enumerate(td.get_process_group_ranks(group)):
        note = "has ended, or has no batch left"
        with suppress(RuntimeError):
            td.distributed_c10d._get_default_store().wait([f"pyro_dvi/{rank}"], timedelta(seconds=5))
            note = td.distributed_c10d._get_default_store().get(f"pyro_dvi/{rank}").decode()
        notes += [f"process {k} {note}"] if note != "waits" else []
    return " and ".join(notes) or "the connection failed"


def results_of_all(work: Callable[[], T], group: Any) -> list[T]:
    """Call ``work`` in each process, and return the results of all processes, in the order of the processes.

    Raises:
        Exception: if ``work`` failed in this process.
        PyroDviError: if ``work`` failed in another process.
    """
    result: Any = None
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:
        failure = error
    messages = messages_of_all((result, failure and f"{type(failure).__name__}: {failure}"), group)
    if failure is not None:
        raise failure
    for k, (_, failed) in enumerate(messages):
        if failed is not None:
            raise PyroDviError(f"process {k} failed: {failed}")
    return [other for other, _ in messages]


def means_of_all(tensors: list[Any], group: Any) -> list[Tensor]:
    """Return the means of tensors over processes; one message is sent for each dtype and device."""
    means = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
    for kind in dict.fromkeys((mean.dtype, mean.device) for mean in means):
        same = [mean for mean in means if (mean.dtype, mean.device) == kind]
        flat = torch.cat([mean.flatten() for mean in same]).div_(td.get_world_size(group))
        td.all_reduce(flat, group=group)
        for mean, total in zip(same, flat.split([mean.numel() for mean in same]), strict=True):
            mean.copy_(total.view_as(mean))
    return means
