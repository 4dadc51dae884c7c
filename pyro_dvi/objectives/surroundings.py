# SPDX-License-Identifier: Apache-2.0
"""The surroundings of a step: tensors and plain attributes of modules that it may use besides its arguments."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, compress
from typing import Any

import pyro
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from pyro_dvi.core.batches import is_strided

Entry = tuple[Callable[[Any], Any], Any, Any, str]  # function to look up a name, name, value, description

# Parts of every module whose entries are compared one by one: submodules, hooks, priors.
_CONTAINERS = frozenset(name for name in vars(nn.Module()) if "hook" in name and "state_dict" not in name) | {
    "_modules",
    "_pyro_samples",
    "_pyro_params",
}
_TENSORS = ("_parameters", "_buffers")
_COUNTED = {"_step", "kl_weight", "terms"}  # attributes of an objective that change in each step
_CHEAP = (  # what may change about a tensor without a new tensor
    operator.methodcaller("data_ptr"),
    operator.methodcaller("stride"),
    operator.attrgetter("requires_grad"),
    operator.attrgetter("shape"),
)


class UsedParts(Messenger):
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


class Surroundings:
    """The modules, parameters and settings that a step may use besides its arguments.

    Tensors are looked up anew for each step, so they may be loaded, moved or replaced between steps. Plain attributes
    of modules and of the objective, submodules, hooks and priors are compared: if one of them has changed, the step
    needs another recording. Nothing else is compared.

    Args:
        used: modules and parameter names that a step used.
        functions: the model and the guide.
        objective: the objective.

    Attributes:
        names: names of the parameters that the step takes from Pyro's store, in the order of their first use.
        tensors: the tensors that were found at the last look.
    """

    def __init__(self, used: UsedParts, functions: Iterable[Callable], objective: Any) -> None:
        self.names = list(used.names)
        owners = [getattr(function, "__self__", function) for function in functions]
        roots = [owner for owner in (*owners, *used.modules) if isinstance(owner, nn.Module)]
        modules = dict.fromkeys(module for root in roots for module in root.modules())
        places: dict[int, list[Entry]] = {}
        values: list[Entry] = []
        for entry in (*_of_modules(modules), *_of_objective(objective)):
            if isinstance(entry[2], Tensor) and is_strided(entry[2]):
                places.setdefault(id(entry[2]), []).append(entry)
            else:
                values.append(entry)
        for name in self.names:
            parameter = stored(name)
            places.setdefault(id(parameter), []).append((stored, name, parameter, name))
        self._gets, self._keys, self._values, self._labels = map(list, zip(*values, strict=True))
        self._shared = list(places.values())
        first = [entries[0] for entries in self._shared]
        self._places = _calls(first)
        tied = [(entries[0], entry) for entries in self._shared for entry in entries[1:]]
        self._tied = _calls(one for one, _ in tied), _calls(other for _, other in tied)
        self._watch()
        self.tensors: list[Tensor] = [entry[2] for entry in first]
        self._note()

    def _note(self) -> None:
        self._metas = list(map(meta, self.tensors))
        self._state = self._state_of(self.tensors)

    @staticmethod
    def _state_of(tensors: list[Tensor]) -> list[list[Any]]:
        return [list(map(read, tensors)) for read in _CHEAP]

    def look(self) -> bool:
        """Look up the tensors; return False if a recording no longer fits.

        It fits if values are unchanged, and if replaced tensors have the same shape, layout, dtype and device.
        """
        now: list[Any] = list(map(operator.call, *self._places))
        if not all(map(operator.is_, now, self.tensors)) or self._state_of(now) != self._state:
            for entries, tensor in zip(self._shared, now, strict=True):
                if not isinstance(tensor, Tensor) or any(get(key) is not tensor for get, key, *_ in entries):
                    return False
            if list(map(meta, now)) != self._metas:
                return False
            self.tensors = now
            self._note()
        elif not all(map(operator.is_, *(map(operator.call, *calls) for calls in self._tied))):
            return False
        return self.changed() is None

    def _watch(self) -> None:
        """Note the dictionaries that contain the values, because reading all of their entries is faster."""
        holders = [key if get is len else getattr(get, "__self__", None) for get, key in self._entries()]
        found = {id(holder): holder for holder in holders if isinstance(holder, dict)}
        self._holders, self._lengths = list(found.values()), list(map(len, found.values()))
        names = {
            (id(h), key) for h, (get, key) in zip(holders, self._entries(), strict=True) if get is not len
        }
        self._filled = list(filter(None, self._holders))
        self._is_watched = [(id(h), key) in names for h in self._filled for key in h]
        self._elsewhere = _calls(
            e for e, h in zip(self._entries(), holders, strict=True) if not isinstance(h, dict)
        )
        self._known = self._current()

    def _entries(self) -> Iterable[tuple[Any, Any]]:
        return zip(self._gets, self._keys, strict=True)

    def _current(self) -> list[Any]:
        held = compress(chain.from_iterable(map(dict.values, self._filled)), self._is_watched)
        return [*held, *map(operator.call, *self._elsewhere)]

    def changed(self) -> str | None:
        """Return a description of a value that has changed; None if nothing has changed."""
        if list(map(len, self._holders)) == self._lengths and all(
            map(operator.is_, self._current(), self._known)
        ):
            return None
        now = list(map(operator.call, self._gets, self._keys))
        for value, before, label in zip(now, self._values, self._labels, strict=True):
            if value is before or (is_plain(value) and type(value) is type(before) and value == before):
                continue
            if is_plain(value) and is_plain(before):
                return f"`{label}` changes from {before!r} to {value!r}"
            return f"`{label}` is replaced in each step"
        self._values = now  # equal, but other objects
        self._watch()
        return None

    def moved(self) -> str | None:
        """Describe an assignment that a step has made and a replay would not repeat; None if there is none."""
        tensors = self.tensors
        if not self.look() or any(map(operator.is_not, tensors, self.tensors)):
            return self.changed() or "each step assigns a tensor to an attribute of a module"
        return None


def _calls(entries: Iterable[tuple[Any, ...]]) -> tuple[list[Any], list[Any]]:
    """Return functions and their arguments, with which all entries are looked up."""
    entries = list(entries)
    return [entry[0] for entry in entries], [entry[1] for entry in entries]


def _of_modules(modules: Iterable[nn.Module]) -> Iterator[Entry]:
    for module in modules:
        own, place = vars(module), type(module).__name__
        if isinstance(module, torch.jit.ScriptModule):  # has its tensors in C++
            named = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            get = partial(getattr, module)
            yield from ((get, name, value, f"{place}.{name}") for name, value in named)
            yield get, "training", module.training, f"{place}.training"
            continue
        yield len, own, len(own), f"the number of attributes of {place}"
        for name, value in own.items():
            if isinstance(value, (Tensor, tuple)) or is_plain(value) or callable(value):
                yield own.get, name, value, f"{place}.{name}"
            elif name in _CONTAINERS or name in _TENSORS:
                yield own.get, name, value, f"{place}.{name}"
                yield len, value, len(value), f"the length of {place}.{name}"
                # A parameter or buffer that is None is a value.
                yield from ((value.get, key, entry, f"{place}.{key}") for key, entry in value.items())


def _of_objective(objective: Any) -> Iterator[Entry]:
    own = vars(objective)
    for name in own.keys() - _COUNTED:
        yield own.get, name, own[name], name
        if type(own[name]).__module__.startswith("pyro_dvi."):
            inside = getattr(own[name], "__dict__", {})
            yield from ((inside.get, n, v, f"{name}.{n}") for n, v in inside.items() if is_plain(v))


def is_plain(value: Any) -> bool:
    """Return True if a value is compared as a whole."""
    kinds = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)
    return value is None or isinstance(value, kinds)


def meta(tensor: Tensor) -> tuple[Any, ...]:
    """Return everything about a tensor, except its values, that determines the operators of a step."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def stored(name: str) -> Tensor | None:
    """Return the unconstrained parameter with this name in Pyro's store."""
    return pyro.get_param_store()._params.get(name)
