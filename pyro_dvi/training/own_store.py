# SPDX-License-Identifier: Apache-2.0
"""Models and guides that use the parameters of their own posterior, whatever Pyro's store holds.

A module of Pyro reads its parameters from the store by name, and takes over what it finds there. The names of two
posteriors of one method are the same, so without this, calling the guide of one would overwrite the other. Two
posteriors of a model that is a function have the networks in common that the function calls.
"""

import copy
from contextlib import nullcontext, suppress
from functools import update_wrapper
from typing import Any

import pyro
import torch
from pyro.nn.module import PyroModule, _Context
from pyro.params.param_store import StateDict
from torch import nn

from pyro_dvi.core.in_turn import in_turn
from pyro_dvi.core.undisturbed import modules_met, undisturbed


class Scope:
    """Pyro's store contains only the parameters of a state within the context, which may be entered again."""

    def __init__(self, state: StateDict) -> None:
        self._state = state

    def __enter__(self) -> None:
        self._scope = pyro.get_param_store().scope(self._state)
        self._scope.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._scope.__exit__(*error)


def bind(part: Any, store: StateDict, networks: Any = None) -> Any:
    """Let calls of a model or guide use the parameters in ``store`` if Pyro's store holds others of the same names.

    Returns the module itself, or a function that calls the given one.

    Args:
        part: a model or guide.
        store: its parameters.
        networks: for a function, the :class:`OwnNetworks` that it calls.

    Example:
        >>> import torch
        >>> first, second = (PyroModule[torch.nn.Linear](1, 1) for _ in range(2))
        >>> for module in (first, second):
        ...     with pyro.get_param_store().scope() as store:
        ...         _ = module(torch.ones(1))
        ...     _ = bind(module, store)
        >>> kept = second.weight.clone()
        >>> _ = first(torch.ones(1)), second(torch.ones(1))
        >>> torch.equal(second.weight, kept)
        True
        >>> pyro.clear_param_store()
    """
    if not isinstance(part, nn.Module):
        has_own = store["params"] or (networks and networks.are_called)
        return OwnFunction(unbound(part), store, networks) if has_own else part
    if isinstance(part, PyroModule):
        shared = part._pyro_context
        own = _OwnStore(store, shared.used)
        for module in part.modules():
            if isinstance(module, PyroModule) and module._pyro_context is shared:
                module._pyro_context = own
    return part


def unbound(part: Any) -> Any:
    """Return the function that :func:`bind` was given."""
    return part.__wrapped__ if isinstance(part, OwnFunction) else part


class OwnFunction:
    """A function whose calls use the parameters and the networks of a posterior."""

    def __init__(self, function: Any, store: StateDict, networks: Any) -> None:
        update_wrapper(self, function)
        self.__wrapped__, self._store, self._networks = function, store, networks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        current = dict(pyro.get_param_store().named_parameters())
        is_own = all(current.get(name) is parameter for name, parameter in self._store["params"].items())
        if is_own and (self._networks is None or self._networks.entered):
            return self.__wrapped__(*args, **kwargs)
        with in_turn.own(Scope(self._store), self._networks or nullcontext()):
            return self.__wrapped__(*args, **kwargs)


class _OwnStore(_Context):
    """The context of the calls of a module and its submodules."""

    def __init__(self, store: StateDict, used: bool) -> None:
        super().__init__()
        self.store, self.used = store, used
        self._scope: Any = None

    def __enter__(self) -> None:
        current = dict(pyro.get_param_store().named_parameters())
        if not self.active and any(current.get(k, p) is not p for k, p in self.store["params"].items()):
            self._scope = pyro.get_param_store().scope(self.store)
            self._scope.__enter__()
        super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if not self.active and self._scope is not None:
            scope, self._scope = self._scope, None
            scope.__exit__(*error)

    def __deepcopy__(self, memo: Any) -> _Context:
        copied = _Context()  # a copy has parameters of its own, which may be trained
        copied.used = self.used
        return copied


class OwnNetworks:
    """Tensors for the networks that a function calls; they are in the networks only within the context.

    Training within the context changes these tensors, which start as copies, and leaves the networks as they were.

    Args:
        function: a model. For a module, there is nothing to exchange, because modules are copied.
        args: positional arguments with which the function runs once.
        kwargs: keyword arguments.

    Example:
        >>> layer = torch.nn.Linear(1, 1)
        >>> own, before = OwnNetworks(lambda x: layer(x), (torch.ones(1),), {}), layer.weight
        >>> with own:
        ...     _ = layer.weight.data.fill_(3.0)
        >>> with own:
        ...     print(layer.weight.item(), layer.weight is before)
        3.0 False
        >>> layer.weight is before
        True
    """

    def __init__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        called: dict[nn.Module, None] = {}
        if not isinstance(function, nn.Module):
            # An error has its explanation in training.
            with suppress(Exception), undisturbed(), pyro.get_param_store().scope(), torch.no_grad():
                with modules_met(called.setdefault):
                    function(*args, **kwargs)
        modules = dict.fromkeys(module for one in called for module in one.modules())
        holders: list[dict[str, Any]] = [
            holder for module in modules for holder in (module._parameters, module._buffers)
        ]
        memo: dict[int, Any] = {}  # tied tensors stay tied
        self._other = [
            (holder, name, copy.deepcopy(value, memo)) for holder in holders for name, value in holder.items()
        ]
        self._depth = 0

    @property
    def are_called(self) -> bool:
        """True if the function calls networks."""
        return bool(self._other)

    @property
    def entered(self) -> bool:
        """True within the context."""
        return self._depth > 0

    def __enter__(self) -> None:
        if not self._depth:
            self._exchange()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._exchange()

    def _exchange(self) -> None:
        now = [holder.get(name) for holder, name, _ in self._other]
        for holder, name, value in self._other:
            holder[name] = value
        self._other = [(holder, name, v) for (holder, name, _), v in zip(self._other, now, strict=True)]
