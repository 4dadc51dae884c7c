# SPDX-License-Identifier: Apache-2.0
"""The surroundings of a step: the tensors and numbers that it may compute with beside its arguments."""

import operator
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import pyro
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from pyro_dvi.objectives.reachable import INSIDE, Entry, Lookup, is_plain, reachable


class Met(Messenger):
    """Note the modules that run in a block, and the names of the parameters that it takes from Pyro's store."""

    def __init__(self) -> None:
        super().__init__()
        self.modules: dict[nn.Module, None] = {}
        self.names: dict[str, None] = {}

    def __enter__(self) -> Any:
        self._hook = register_module_forward_pre_hook(lambda module, _: self.modules.setdefault(module))
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        self._hook.remove()
        return super().__exit__(*error)

    def _pyro_post_param(self, msg: Any) -> None:
        if stored(msg["name"]) is not None:  # not a module's own
            self.names[msg["name"]] = None


class _Entries(list[Entry]):
    """Places with their values, which are compared without a loop in Python."""

    @cached_property
    def _columns(self) -> tuple[Any, ...]:
        gets, names, values, _ = zip(*self, strict=True) if self else ((), (), (), ())
        return gets, names, list(values), list(map(type, values))

    def are_equal(self) -> bool:
        """Return whether all values are what they were, in value and type."""
        gets, names, values, types = self._columns
        now = list(map(operator.call, gets, names))
        return now == values and list(map(type, now)) == types

    def are_same(self) -> bool:
        """Return whether all are the objects that they were."""
        gets, names, values, _ = self._columns
        return all(map(operator.is_, map(operator.call, gets, names), values))


class Surroundings:
    """Everything beside its arguments that a step may compute with, by the places where it is found.

    Tensors are looked up anew for each step, so that they may be loaded, moved or replaced in between. Numbers are
    compared: with other numbers, or other objects in their places, it is another step.

    Args:
        met: modules and names that the step has met.
        functions: the model and the guide.
        settings: further values to compare, with the places where they are found.

    Attributes:
        names: names of the parameters that the step takes from Pyro's store, in the order of their first use.
    """

    def __init__(self, met: Met, functions: Iterable[Callable], settings: Iterable[Entry]) -> None:
        self.names = list(met.names)
        self._numbers, self._objects, self._states = _Entries(), _Entries(), _Entries()
        places: dict[int, list[tuple[Lookup, Any]]] = {}
        for get, name, value, place in (*reachable([*functions, *met.modules]), *settings):
            if isinstance(value, Tensor):
                places.setdefault(id(value), []).append((get, name))
            elif name is INSIDE:
                self._states.append((get, name, value, place))
            else:
                (self._numbers if is_plain(value) else self._objects).append((get, name, value, place))
        for name in self.names:
            places.setdefault(id(stored(name)), []).append((stored, name))
        self._places = list(places.values())

    def tensors(self) -> list[Tensor] | None:
        """Return the tensors that are there now; None where one is gone, or no longer the same in all its places."""
        found = []
        for (get, name), *others in self._places:
            tensor = get(name)
            if not isinstance(tensor, Tensor) or any(again(other) is not tensor for again, other in others):
                return None
            found.append(tensor)
        return found

    def changed(self) -> str | None:
        """Say which number or object is not what it was; None if all are."""
        if self._numbers.are_equal() and self._objects.are_same() and self._states.are_equal():
            return None
        for get, name, value, place in self._numbers:
            now = get(name)
            if now is not value and (type(now) is not type(value) or now != value):
                return f"{place} changes from {value!r} to {now!r}"
        for get, name, value, place in self._objects:
            if get(name) is not value:
                return f"each step has another {place}"
        for get, name, value, place in self._states:
            if get(name) != value:
                return f"{place} moves, as a random generator or an iterator does"
        return None

    def moved(self, tensors: list[Tensor]) -> str | None:
        """Say what a step has changed by assignment, which a replay would not do."""
        now = self.tensors()
        if now is None or any(a is not b for a, b in zip(now, tensors, strict=True)):
            return "each step assigns a tensor to an attribute of a module or object"
        return self.changed()


def meta(tensor: Tensor) -> tuple[Any, ...]:
    """Return all that decides which operators a tensor goes through, but for its values."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def stored(name: str) -> Tensor | None:
    """Return the unconstrained parameter of a name in Pyro's store."""
    return pyro.get_param_store()._params.get(name)
