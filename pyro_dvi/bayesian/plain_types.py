# SPDX-License-Identifier: Apache-2.0
"""Which ordinary class a module had before Pyro converted it in place."""

from pyro.nn.module import PyroModule, _PyroModuleMeta
from torch import nn

__all__ = ["plain_type"]


def plain_type(module: nn.Module) -> type[nn.Module] | None:
    """Return the class of ``module`` without Pyro, or ``None`` for a class that was written as a ``PyroModule``.

    Example:
        >>> plain_type(PyroModule[nn.Linear](1, 1))
        <class 'torch.nn.modules.linear.Linear'>
    """
    kind = type(module)
    if kind is PyroModule:  # the Pyro version of a bare nn.Module
        return nn.Module
    if not issubclass(kind, PyroModule):
        return kind
    for plain, converted in _PyroModuleMeta._pyro_mixin_cache.items():
        if converted is kind:
            return plain
    return None
