# SPDX-License-Identifier: Apache-2.0
"""Everything that Python code can reach from functions and objects: attributes, variables, entries of containers."""

import random
import sys
from argparse import Namespace
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from pyro.nn.module import PyroParam, PyroSample
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn

Lookup = Callable[[Any], Any]
Entry = tuple[Lookup, Any, Any, str]  # function to look up a name, name, value, description

_CLOSED = {
    "torch",
    "torchvision",
    "pyro",
    "pyro_dvi",
    "numpy",
    "arviz",
    "lightning",
} | sys.stdlib_module_names
_OPEN = (
    nn.Module,
    Messenger,
    SimpleNamespace,
    PyroSample,
    PyroParam,
    torch.distributions.Distribution,
    torch.distributions.Transform,
    Namespace,
    UserDict,
)
_CONTAINERS = frozenset(vars(nn.Module()))  # attributes of every module: containers that are never replaced
_LEFT_OUT = {
    "plates",
    "_inv",  # in torch's transforms
    *(n for n in _CONTAINERS if "state_dict" in n or "persistent" in n),
}  # attributes that are new in each step, or are used only for files
INSIDE = object()  # stands in place of a name for the state of an object that changes when it is used
_MANY = 1000  # containers with more entries are not inspected


@cache  # cached, because NumPy loads its generators on first use
def _states() -> dict[type, Callable[[Any], Any]]:
    """Return functions that read the internal state of objects without attributes."""
    return {
        random.Random: lambda it: it.getstate(),
        np.random.Generator: lambda it: repr(it.bit_generator.state),
        np.random.RandomState: lambda it: repr(it.get_state(legacy=False)),
        torch.Generator: lambda it: it.get_state().numpy().tobytes(),
        np.ndarray: lambda it: it.tobytes(),
    }


def is_plain(value: Any) -> bool:
    """Return True if a value is compared as a whole, so that its contents need no inspection."""
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes))


def reachable(roots: Iterable[Any]) -> Iterator[Entry]:
    """Yield everything that can be reached from the given functions, modules and objects.

    Among the objects of libraries, only modules are inspected.
    """
    seen: set[int] = set()
    held: list[Any] = []  # kept alive, so that no id is reused
    waiting = [_inside(root, type(root).__name__) for root in roots]
    while waiting:
        for entry in waiting.pop():
            get, name, value, place = entry
            if not (isinstance(value, dict) and name in _CONTAINERS):
                yield entry
            if is_plain(value) or isinstance(value, Tensor) or id(value) in seen:
                continue
            seen.add(id(value))
            held.append(value)
            waiting.append(_inside(value, place))


def _inside(owner: Any, place: str) -> Iterator[Entry]:
    kind = type(owner)
    if kind in _states() and getattr(owner, "size", 0) <= _MANY:
        read = partial(_states()[kind], owner)
        yield lambda _: read(), INSIDE, read(), place
    elif isinstance(owner, Iterator):  # an iterator does not reveal its position
        yield lambda _: object(), INSIDE, None, place
    elif isinstance(owner, (list, tuple, deque, dict, set)):
        yield from _of_object(owner, place)
        if isinstance(owner, set) and len(owner) <= _MANY:
            yield lambda _: frozenset(owner), INSIDE, frozenset(owner), place
        yield len, owner, len(owner), f"the length of {place}"
        if isinstance(owner, dict) and len(owner) <= _MANY:
            yield from ((owner.get, key, value, f"{place}[{key!r}]") for key, value in owner.items())
        elif not isinstance(owner, (dict, set)) and len(owner) <= _MANY:
            yield from ((partial(_entry, owner), k, value, f"{place}[{k}]") for k, value in enumerate(owner))
    elif isinstance(owner, torch.jit.ScriptModule):
        names = [
            name for name, _ in (*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False))
        ]
        parts = (name for name, _ in owner.named_children())
        yield from _attributes(owner, place, "training", *names, *parts)
    elif isinstance(owner, FunctionType):
        yield from _variables(owner, place)
    elif isinstance(owner, MethodType):
        yield from _attributes(owner, place, "__self__", "__func__")
    elif isinstance(owner, partial):
        yield from _attributes(owner, place, "func", "args", "keywords")
    elif isinstance(owner, (staticmethod, classmethod)):
        yield from _attributes(owner, place, "__func__")
    elif isinstance(owner, property):
        yield from _attributes(owner, place, "fget")
    elif isinstance(owner, type):
        yield from _of_classes(owner)
    elif isinstance(owner, ModuleType):
        if owner.__name__.partition(".")[0] not in _CLOSED:
            simple = (Tensor, list, tuple, dict, set)
            found = _named(vars(owner), place)
            yield from (entry for entry in found if is_plain(entry[2]) or isinstance(entry[2], simple))
    elif isinstance(owner, _OPEN) or not _is_closed(kind):
        yield from _of_object(owner, place)
        for part in kind.__mro__:
            if not _is_closed(part):
                slots = vars(part).get("__slots__", ())
                yield from _attributes(owner, place, *(slot for slot in slots if hasattr(owner, slot)))
    elif hasattr(owner, "__wrapped__"):
        yield from _attributes(owner, place, "__wrapped__")


def _of_object(owner: Any, place: str) -> Iterator[Entry]:
    """Yield the attributes of an object and of its classes."""
    own = getattr(owner, "__dict__", None)
    if own is None:  # no attributes of its own, for example a Python list
        return
    yield len, own, len(own), f"the number of attributes of {place}"
    yield from (entry for entry in _named(own, place) if entry[1] not in _LEFT_OUT)
    yield from _of_classes(type(owner))


def _of_classes(kind: type) -> Iterator[Entry]:
    """Yield the attributes of a class and of its base classes."""
    for part in kind.__mro__:
        if not _is_closed(part):
            yield len, vars(part), len(vars(part)), f"the number of attributes of {part.__name__}"
            yield from _named(vars(part), part.__name__)


def _variables(function: Any, place: str) -> Iterator[Entry]:
    """Yield the variables from outside a function that the function uses."""
    code = function.__code__
    yield from _attributes(function, place, "__defaults__", "__kwdefaults__")
    yield from _named(function.__dict__, place)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield partial(_content, cell), name, _content(cell, name), name
    if _is_closed(function):
        return
    known = function.__globals__
    names = _names(code)
    for name in names & known.keys():
        value = known[name]
        if isinstance(value, ModuleType):
            if value.__name__.partition(".")[0] not in _CLOSED:
                inside = vars(value)
                yield from ((inside.get, part, inside[part], part) for part in names & inside.keys())
        else:
            yield known.get, name, value, name


def _names(code: CodeType) -> set[str]:
    """Return the names of globals and attributes that occur in a function and in its inner functions."""
    inside = [_names(part) for part in code.co_consts if isinstance(part, CodeType)]
    return set(code.co_names).union(*inside)


def _named(container: Any, place: str) -> Iterator[Entry]:
    names = [
        name
        for name in container
        if not (name.startswith("__") and name.endswith("__")) or name == "__call__"
    ]
    return ((container.get, name, container[name], f"{place}.{name}") for name in names)


def _attributes(owner: Any, place: str, *names: str) -> Iterator[Entry]:
    return ((partial(_attribute, owner), name, getattr(owner, name), f"{place}.{name}") for name in names)


def _is_closed(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] in _CLOSED


def _attribute(owner: Any, name: str) -> Any:
    return getattr(owner, name, None)


def _entry(container: Any, k: int) -> Any:
    return container[k] if k < len(container) else None


def _content(cell: Any, _name: str) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable is not assigned yet
        return None
