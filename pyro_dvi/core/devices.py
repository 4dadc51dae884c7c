# SPDX-License-Identifier: Apache-2.0
"""What accelerators of different kinds differ in: their random generators, and whether they have float64."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn


def accelerators() -> list[torch.device]:
    """Return the devices beside the CPU whose generators this process may have drawn from."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None:
        return []
    module = torch.get_device_module(kind)
    if not getattr(module, "is_initialized", lambda: True)():  # to look would be to initialise it
        return []
    return [torch.device(kind.type, k) for k in range(module.device_count())]


def device_of(*functions: Any) -> torch.device | None:
    """Return the device of the first parameter of the first module that has one; None if none has."""
    modules = [function for function in functions if isinstance(function, nn.Module)]
    tensors = chain.from_iterable(chain(module.parameters(), module.buffers()) for module in modules)
    return next((tensor.device for tensor in tensors), None)


def state_of(device: torch.device) -> tuple[Callable[[], Tensor], Callable[[Tensor], Any]]:
    """Return what reads and what sets the state of the device's global generator."""
    if device.type == "cpu":
        return torch.get_rng_state, torch.set_rng_state
    module = torch.get_device_module(device)
    if device.type == "mps":  # there is one, and it does not ask which
        return module.get_rng_state, module.set_rng_state
    return partial(module.get_rng_state, device), partial(module.set_rng_state, device=device)


@contextmanager
def forked(*devices: torch.device | None) -> Iterator[None]:
    """Put the generators of the CPU and of these devices back when the block ends.

    Example:
        >>> with forked():
        ...     first = torch.rand(())
        >>> bool(first == torch.rand(()))
        True
    """
    used = {torch.device("cpu"), *(device for device in devices if device is not None)}
    generators = [state_of(device) for device in used]
    before = [get() for get, _ in generators]
    try:
        yield
    finally:
        for (_, put), state in zip(generators, before, strict=True):
            put(state)


def seeder() -> Callable[[int], Any]:
    """Return what seeds all global generators.

    Where there is no accelerator this is not ``torch.manual_seed``, which notes down the seed for one, with a stack
    trace; that takes longer than a small model.
    """
    return torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed


def reseeded(count: int) -> Iterator[None]:
    """Seed all global generators ``count`` times, with numbers drawn from the global one before the first.

    How many random numbers a draw uses then does not matter to the next one.
    """
    seed_all = seeder()
    for seed in torch.randint(2**31 - 1, (count,)).tolist():
        seed_all(seed)
        yield


def widest(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on a device that has no other, as Apple's.

    Example:
        >>> widest(torch.device("cpu"))
        torch.float64
    """
    try:
        return torch.empty(0, dtype=torch.float64, device=device).dtype
    except TypeError:
        return torch.float32
