# SPDX-License-Identifier: Apache-2.0
"""Random numbers of the emulated device: a state of its own, and generators that serve no other device.

Its numbers are those of the CPU at the same seed, so that tests can compare the two.
"""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_CPU_GENERATOR = torch.Generator
default = torch.Generator()  # of the device; seeded by torch.manual_seed
# torch hands a kernel the generator itself, but in another Python object: they are told apart by address.
_emulated: weakref.WeakValueDictionary[int, torch.Generator] = weakref.WeakValueDictionary()


class EmulatedGenerator(_CPU_GENERATOR):
    """A generator that says it is of the emulated device."""

    @property
    def device(self) -> torch.device:
        return torch.device("emulated", 0)


class _Meta(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _CPU_GENERATOR)


class Generator(metaclass=_Meta):
    """What stands for ``torch.Generator`` where the emulated device is in use: torch cannot make one for it."""

    def __new__(cls, device: Any = "cpu") -> torch.Generator:  # type: ignore[misc]
        if torch.device(device).type != "emulated":
            return _CPU_GENERATOR(device)
        generator = EmulatedGenerator()
        _emulated[generator._cdata] = generator  # type: ignore[attr-defined]
        return generator


@contextlib.contextmanager
def drawn(generator: torch.Generator | None) -> Iterator[None]:
    """Let an operation draw from ``generator`` or, without one, from the state of the device."""
    if generator is not None:
        if generator._cdata not in _emulated:  # type: ignore[attr-defined]
            raise RuntimeError("Expected a 'emulated' device type for generator but found 'cpu'")
        yield
        return
    outer = torch.get_rng_state()
    torch.set_rng_state(default.get_state())
    try:
        yield
    finally:
        default.set_state(torch.get_rng_state())
        torch.set_rng_state(outer)


def get_rng_state(device: Any = "emulated") -> Tensor:
    return default.get_state()


def set_rng_state(state: Tensor, device: Any = "emulated") -> None:
    default.set_state(state)
