# SPDX-License-Identifier: Apache-2.0
"""What one more run of a model tells on it: whether it draws, keeps things, and how large its tensors are."""

import pickle
import random
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pyro_dvi.core.recording import Watch
from pyro_dvi.core.undisturbed import state_of

LARGE = 1000  # entries of a container of which only the number is compared


class Probe:
    """Watches a run of a model inside ``with``.

    Attributes:
        size: elements of the largest tensor that was computed.
    """

    def __init__(self, device: torch.device) -> None:
        self.size = 0
        self._device = device
        self._seen: dict[int, tuple[nn.Module, list[Any]]] = {}
        self._output = _LargestOutput()

    def __enter__(self) -> "Probe":
        self._before = _generators(self._device)
        self._handle = nn.modules.module.register_module_forward_pre_hook(self._look)
        self._output.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._output.__exit__(*error)
        self._handle.remove()
        self.size = self._output.size

    @property
    def drew(self) -> bool:
        """Whether the run used random numbers of its own, of torch, NumPy or Python."""
        return self._before != _generators(self._device)

    @property
    def kept(self) -> bool:
        """Whether a module that ran holds another tensor or value than before."""
        return any(not _same(_state(module), before) for module, before in self._seen.values())

    def _look(self, module: nn.Module, _inputs: object) -> None:
        for inner in module.modules():
            if id(inner) not in self._seen:
                self._seen[id(inner)] = (inner, _state(inner))


def agrees(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    """Whether statistics are the same but for rounding."""
    for name, value in expected.items():
        if not value.is_floating_point():
            continue
        tolerance = 10 * torch.finfo(value.dtype).eps ** 0.5
        size = float(value.nan_to_num(0, 0, 0).abs().max()) if value.numel() else 0.0
        if not torch.allclose(found[name], value, rtol=tolerance, atol=tolerance * size, equal_nan=True):
            return False
    return True


def _state(module: nn.Module) -> list[Any]:
    """Everything that a module holds itself."""
    return _leaves(vars(module), depth=3)


def _leaves(value: Any, depth: int) -> list[Any]:
    """Objects in nested containers; tensors with the number of their changes in place."""
    if isinstance(value, Tensor):
        return [value, None if value.is_inference() else value._version]
    if isinstance(value, (dict, list, tuple, set, deque)) and depth > 0:
        entries = value.values() if isinstance(value, dict) else value
        if len(value) > LARGE:  # a vocabulary, say
            return [len(value)]
        return [len(value)] + [leaf for entry in entries for leaf in _leaves(entry, depth - 1)]
    return [value]


def _same(first: list[Any], second: list[Any]) -> bool:
    # Identity for objects: equality of tensors is no truth value.
    return len(first) == len(second) and all(
        a is b or (isinstance(a, (int, float, str)) and type(a) is type(b) and a == b)
        for a, b in zip(first, second, strict=True)
    )


def _generators(device: torch.device) -> tuple[Any, ...]:
    return state_of(device)[0]().numpy().tobytes(), pickle.dumps(np.random.get_state()), random.getstate()


class _LargestOutput(Watch):
    """Notes the size of the largest tensor that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):  # expanded views hold less than they show
                held = leaf.untyped_storage().nbytes() // leaf.element_size()
                self.size = max(self.size, min(held, leaf.numel()))
        return result
