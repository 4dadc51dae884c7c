# SPDX-License-Identifier: Apache-2.0
"""The surroundings of a step: tensors of modules and of Pyro's store, and the numbers of objects."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import FunctionType
from typing import Any

import pyro
from pyro.poutine.messenger import Messenger
from torch import Generator, Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

Lookup = Callable[[str], Any]
Entry = tuple[Lookup, str, Any]  # a function that looks up names, a name, and its value
_LARGEST = 100  # of dictionaries whose entries are compared in every step
_LIBRARIES = ("torch", "pyro")  # and pyro_dvi


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


class Surroundings:
    """Everything beside its arguments that a step may compute with, by the places where it is found.

    Tensors are looked up anew for each step, so that they may be loaded, moved or replaced in between. Numbers are
    compared: with other numbers it is another step.

    Args:
        met: modules and names that the step has met.
        functions: the model and the guide.
        others: further values that count.

    Attributes:
        names: of the parameters that it takes from Pyro's store, in the order of their first use.
        generators: random generators of objects.
    """

    def __init__(self, met: Met, functions: Iterable[Callable], others: Iterable[Entry]) -> None:
        self.names = list(met.names)
        self._numbers: list[Entry] = []
        self.generators: list[Generator] = []
        places: dict[int, list[tuple[Lookup, str]]] = {}
        owners: dict[int, Any] = {id(module): module for module in met.modules}
        for function in functions:
            owner = getattr(function, "__self__", function)
            inside = owner.modules() if isinstance(owner, nn.Module) else [owner]
            owners |= {id(one): one for one in inside}
        found = [entry for owner in owners.values() for entry in _entries(owner)]
        for get, name, value in [*found, *others]:
            if isinstance(value, Tensor):
                places.setdefault(id(value), []).append((get, name))
            elif _is_plain(value):
                self._numbers.append((get, name, value))
            elif isinstance(value, Generator):
                self.generators.append(value)
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
        """Say which number is not what it was; None if all are."""
        for get, name, value in self._numbers:
            now = get(name)
            if now is not value and (type(now) is not type(value) or now != value):
                return f"{name!r} changes from {value!r} to {now!r}"
        return None

    def moved(self, tensors: list[Tensor]) -> str | None:
        """Say what a step has changed by assignment, which a replay would not do."""
        now = self.tensors()
        if now is None or any(a is not b for a, b in zip(now, tensors, strict=True)):
            return "each step assigns a tensor to an attribute of a module or object"
        return self.changed()

    def put_back(self, tensors: list[Tensor]) -> None:
        """Undo what a step that is to be taken again has assigned to attributes."""
        held = zip(self._places, tensors, strict=True)
        entries = [(get, name, tensor) for places, tensor in held for get, name in places]
        for get, name, value in [*entries, *self._numbers]:
            holder = getattr(get, "__self__", None)
            if isinstance(holder, dict) and holder.get(name) is not value:
                holder[name] = value


def meta(tensor: Tensor) -> tuple[Any, ...]:
    """Return all that decides which operators a tensor goes through, but for its values."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def stored(name: str) -> Tensor | None:
    """Return the unconstrained parameter of a name in Pyro's store."""
    return pyro.get_param_store()._params.get(name)


def _entries(owner: Any) -> Iterator[Entry]:
    """Yield the attributes of a module or object and theirs, or the variables that a function finds outside itself."""
    attributes = getattr(owner, "__dict__", {})
    yield from items(attributes)
    for value in attributes.values():
        inside = value if isinstance(value, dict) else _record(value)
        if len(inside) <= _LARGEST:
            yield from items(inside)
    code = getattr(owner, "__code__", None)
    if code is not None:
        known = owner.__globals__
        yield from ((known.get, name, known[name]) for name in code.co_names if name in known)
        for name, cell in zip(code.co_freevars, owner.__closure__ or (), strict=True):
            yield partial(_content, cell), name, _content(cell, name)


def _record(value: Any) -> dict[str, Any]:
    """Return the attributes of an object that is as simple as a configuration."""
    known = isinstance(value, (nn.Module, type, FunctionType))
    return {} if known or type(value).__module__.startswith(_LIBRARIES) else getattr(value, "__dict__", {})


def items(container: dict[str, Any]) -> Iterator[Entry]:
    """Yield the entries of a dictionary."""
    return ((container.get, name, value) for name, value in container.items())


def _content(cell: Any, _name: str) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))
