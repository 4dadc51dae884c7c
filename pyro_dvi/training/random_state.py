# SPDX-License-Identifier: Apache-2.0
"""States of the random generators used in training."""

import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from pyro_dvi.core.undisturbed import accelerators, state_of


def random_state(loader: Any = None) -> dict[str, Any]:
    """Return the states of the generators of torch (CPU and accelerators), NumPy, Python, and a loader.

    Pyro draws from the generators of torch, NumPy and Python. The result contains only tensors, numbers and tuples, so
    that ``torch.load(weights_only=True)`` can read it.
    """
    kind, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "accelerators": {str(device): state_of(device)[0]() for device in accelerators()},
        "numpy": (kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "python": random.getstate(),
        "loader": [generator.get_state() for generator in _generators(loader)],
    }


def restore_random_state(state: dict[str, Any], loader: Any = None) -> None:
    """Restore the global generators to ``state``, and, if a loader is given, also the generators of the loader."""
    torch.set_rng_state(state["torch"].cpu())
    for device in accelerators():
        if str(device) in state["accelerators"]:
            state_of(device)[1](state["accelerators"][str(device)].cpu())
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.cpu().numpy().astype(np.uint32), *rest))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    for generator, entry in zip(_generators(loader), state["loader"], strict=False):
        generator.set_state(entry.cpu())


@contextmanager
def preserve_random_state(loader: Any = None) -> Iterator[None]:
    """Restore all random states at the end of the context.

    Example:
        >>> with preserve_random_state():
        ...     first = torch.rand(())
        >>> bool(first == torch.rand(()))
        True
    """
    state = random_state(loader)
    try:
        yield
    finally:
        restore_random_state(state, loader)


def _generators(loader: Any) -> list[torch.Generator]:
    found: dict[int, torch.Generator] = {}
    for holder in ("", "sampler.", "batch_sampler.", "batch_sampler.sampler."):
        with suppress(AttributeError):
            generator = attrgetter(f"{holder}generator")(loader)
            if isinstance(generator, torch.Generator):
                found[id(generator)] = generator
    return list(found.values())
