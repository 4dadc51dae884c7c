# SPDX-License-Identifier: Apache-2.0
"""Models and guides that use the parameters of their own posterior, whatever Pyro's store holds.

A module of Pyro reads its parameters from the store by name, and takes over what it finds there. The names of two
posteriors of one method are the same, so without this, calling the guide of one would overwrite the other.
"""

from typing import Any

import pyro
from pyro.nn.module import PyroModule, _Context
from pyro.params.param_store import StateDict


def bind(part: Any, store: StateDict) -> None:
    """Let calls of a Pyro module use the parameters in ``store`` if Pyro's store holds others of the same names.

    Example:
        >>> import torch
        >>> first, second = (PyroModule[torch.nn.Linear](1, 1) for _ in range(2))
        >>> for module in (first, second):
        ...     with pyro.get_param_store().scope() as store:
        ...         _ = module(torch.ones(1))
        ...     bind(module, store)
        >>> kept = second.weight.clone()
        >>> _ = first(torch.ones(1)), second(torch.ones(1))
        >>> torch.equal(second.weight, kept)
        True
        >>> pyro.clear_param_store()
    """
    if isinstance(part, PyroModule):
        shared = part._pyro_context
        own = _OwnStore(store, shared.used)
        for module in part.modules():
            if isinstance(module, PyroModule) and module._pyro_context is shared:
                module._pyro_context = own


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
