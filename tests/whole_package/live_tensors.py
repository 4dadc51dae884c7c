# SPDX-License-Identifier: Apache-2.0
"""Follow the memory of tensors to its end, wherever it is held.

Python's garbage collector does not see a tensor that only nodes of autograd's graph hold, in C++. Here torch's own
weak references say which storages live.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Live", "growth"]


@dataclass(frozen=True)
class Live:
    """What is alive: memory blocks of tensors, their bytes, and the tensors that Python sees."""

    storages: int
    bytes: int
    tensors: int

    def __sub__(self, other: "Live") -> "Live":
        return Live(self.storages - other.storages, self.bytes - other.bytes, self.tensors - other.tensors)


class _Storages(TorchDispatchMode):
    """Note the storage of every result of an operator, in forward and backward passes alike."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                self._known[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def live(self) -> Live:
        self._known = {key: known for key, known in self._known.items() if not known[0].expired()}
        seen = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
        return Live(len(self._known), sum(size for _, size in self._known.values()), seen)


def growth(call: Callable[[], object], repeats: int = 2, *, collected: bool = False) -> Live:
    """Return by how much calls after the first ones let live tensors grow.

    Args:
        call: what is repeated.
        repeats: how often, after two calls that may fill what is kept.
        collected: whether the garbage collector runs before tensors are counted. Without it a cycle of Python objects
            counts as a leak: its tensors wait for a collector that knows nothing of their size.
    """

    def live() -> Live:
        if collected:
            gc.collect()
        return storages.live()

    gc.freeze()  # the garbage collector goes through new objects only, which takes a hundredth of the time
    gc.disable()
    try:
        with _Storages() as storages:
            call(), call()
            before = live()
            for _ in range(repeats):
                call()
            return live() - before
    finally:
        gc.enable()
        gc.unfreeze()
