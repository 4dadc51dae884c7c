# SPDX-License-Identifier: Apache-2.0
"""States of the random generators used in training."""

import random
from contextlib import suppress
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


class preserve_random_state:  # noqa: N801 (a context)
    """Restore all random states at the end of the context; if it is entered again, its own states go on.

    Example:
        >>> with preserve_random_state():
        ...     first = torch.rand(())
        >>> bool(first == torch.rand(()))
        True
    """

    def __init__(self, loader: Any = None) -> None:
        self._loader, self._other = loader, dict[str, Any]()

    def __enter__(self, *_: object) -> None:
        now = random_state(self._loader)
        if self._other:
            restore_random_state(self._other, self._loader)
        self._other = now

    __exit__ = __enter__


def _generators(loader: Any) -> list[torch.Generator]:
    found: dict[int, torch.Generator] = {}
    for holder in ("", "sampler.", "batch_sampler.", "batch_sampler.sampler."):
        with suppress(AttributeError):
            generator = attrgetter(f"{holder}generator")(loader)
            if isinstance(generator, torch.Generator):
                found[id(generator)] = generator
    return list(found.values())
