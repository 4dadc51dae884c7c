# SPDX-License-Identifier: Apache-2.0
"""The state of every random generator that training draws from."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from pyro_dvi.core.undisturbed import accelerators, state_of
from pyro_dvi.errors import CheckpointError


def random_state(*loaders: Any) -> dict[str, Any]:
    """Collect the states of torch (CPU and accelerators), NumPy, Python and of the loaders' own generators.

    Pyro has no generator of its own: it draws from these three. The result holds tensors, numbers and tuples
    only, so that ``torch.load(weights_only=True)`` can read it.
    """
    kind, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "accelerators": {str(device): state_of(device)[0]() for device in accelerators()},
        "numpy": (kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "python": random.getstate(),
        "loaders": [generator.get_state() for generator in _generators(loaders)],
    }


def check_generators(state: dict[str, Any], *loaders: Any) -> None:
    """Compare the loaders with those of ``state``.

    Raises:
        CheckpointError: if they have another number of generators.
    """
    given = len(_generators(loaders))
    if given != len(state["loaders"]):
        raise CheckpointError(
            f"The state holds {len(state['loaders'])} generators of data loaders, but the loader given has {given}. "
            "Pass the same kind of loader (same generator=... argument) to save and load, or restore_random=False to "
            "go on with fresh random numbers."
        )


def restore_random_state(state: dict[str, Any], *loaders: Any) -> None:
    """Put every generator back to ``state``.

    Raises:
        CheckpointError: if the loaders have another number of generators than those of ``state``.
    """
    check_generators(state, *loaders)
    torch.set_rng_state(state["torch"].cpu())
    for device in accelerators():
        if str(device) in state["accelerators"]:
            state_of(device)[1](state["accelerators"][str(device)].cpu())
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.cpu().numpy().astype(np.uint32), *rest))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    for generator, entry in zip(_generators(loaders), state["loaders"], strict=True):
        generator.set_state(entry.cpu())


@contextmanager
def preserve_random_state(*loaders: Any) -> Iterator[None]:
    """Let nothing that is drawn inside the block change what is drawn after it.

    Example:
        >>> with preserve_random_state():
        ...     first = torch.rand(())
        >>> bool(first == torch.rand(()))
        True
    """
    state = random_state(*loaders)
    try:
        yield
    finally:
        restore_random_state(state, *loaders)


def _generators(loaders: tuple[Any, ...]) -> list[torch.Generator]:
    found: dict[int, torch.Generator] = {}
    for loader in loaders:
        for holder in ("", "sampler.", "batch_sampler.", "batch_sampler.sampler."):
            try:
                generator = attrgetter(f"{holder}generator")(loader)
            except AttributeError:
                continue
            if isinstance(generator, torch.Generator):
                found.setdefault(id(generator), generator)
    return list(found.values())
