# SPDX-License-Identifier: Apache-2.0
"""The surroundings of a step: the tensors and values that it may use besides its arguments."""

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
    """Record the modules that run in the context, and the names of parameters taken from Pyro's store."""

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
        if stored(msg["name"]) is not None:  # otherwise, the parameter belongs to a module
            self.names[msg["name"]] = None


class _Entries(list[Entry]):
    """Places with their values, which are compared without a Python loop."""

    @cached_property
    def _columns(self) -> tuple[Any, ...]:
        gets, names, values, _ = zip(*self, strict=True) if self else ((), (), (), ())
        return gets, names, list(values), list(map(type, values))

    def are_equal(self) -> bool:
        """Return True if all values and their types are unchanged."""
        gets, names, values, types = self._columns
        now = list(map(operator.call, gets, names))
        return now == values and list(map(type, now)) == types

    def are_same(self) -> bool:
        """Return True if all places contain the same objects as before."""
        gets, names, values, _ = self._columns
        return all(map(operator.is_, map(operator.call, gets, names), values))


class Surroundings:
    """Everything that a step may use besides its arguments, together with the places where it is stored.

    Tensors are looked up anew for each step, so they may be loaded, moved or replaced between steps. Plain values and
    objects are compared: if one of them has changed, the step needs another recording.

    Args:
        met: modules and parameter names that the step used.
        functions: the model and the guide.
        settings: additional values to compare, with the places where they are stored.

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
        """Return the current tensors; None if one is missing, or if places that shared a tensor no longer do."""
        found = []
        for (get, name), *others in self._places:
            tensor = get(name)
            if not isinstance(tensor, Tensor) or any(again(other) is not tensor for again, other in others):
                return None
            found.append(tensor)
        return found

    def changed(self) -> str | None:
        """Return a description of a value or object that has changed; None if nothing has changed."""
        if self._numbers.are_equal() and self._objects.are_same() and self._states.are_equal():
            return None
        for get, name, value, place in self._numbers:
            now = get(name)
            if now is not value and (type(now) is not type(value) or now != value):
                return f"`{place}` changes from {value!r} to {now!r}"
        for get, name, value, place in self._objects:
            if get(name) is not value:
                return f"`{place}` is replaced in each step"
        for get, name, value, place in self._states:
            if get(name) != value:
                return f"`{place}` changes its state in each step, like a random generator or an iterator"
        return None

    def moved(self, tensors: list[Tensor]) -> str | None:
        """Describe an assignment that a step has made and a replay would not repeat; None if there is none."""
        now = self.tensors()
        if now is None or any(a is not b for a, b in zip(now, tensors, strict=True)):
            return "each step assigns a tensor to an attribute of a module or object"
        return self.changed()


def meta(tensor: Tensor) -> tuple[Any, ...]:
    """Return everything about a tensor, except its values, that determines the operators of a step."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def stored(name: str) -> Tensor | None:
    """Return the unconstrained parameter with this name in Pyro's store."""
    return pyro.get_param_store()._params.get(name)
