# SPDX-License-Identifier: Apache-2.0
"""Modules that cannot be turned into Pyro modules in place, each with the way out."""

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from pyro_dvi.errors import ArgumentError, ModelError, UnsupportedError

__all__ = ["check_convertible"]

_WRAPPERS = {
    "DataParallel": "convert the wrapped module, net.module; Pyro's sites cannot be replicated over threads",
    "DistributedDataParallel": "convert the module before wrapping it",
    "FullyShardedDataParallel": "convert the module before wrapping it; its flattened parameters have no "
    "sites",
    "FSDPModule": "convert the module before fully_shard is applied",
    "OptimizedModule": "convert the module before torch.compile, or pass net._orig_mod",
}


def check_convertible(root: nn.Module) -> None:
    """Raise if some module below ``root`` cannot become a ``PyroModule``.

    Raises:
        ArgumentError: if ``root`` is no module.
        ModelError: if a lazy module has not seen data yet.
        UnsupportedError: for wrapped, compiled and scripted modules.
    """
    if not isinstance(root, nn.Module):
        raise ArgumentError(
            f"to_bayesian_ converts a torch.nn.Module, and got a {type(root).__name__}"
            + (" (the class itself: pass an instance)." if isinstance(root, type) else ".")
        )
    for path, module in root.named_modules():
        place = f"{path!r}, a {type(module).__name__}," if path else f"The module, a {type(module).__name__},"
        for ancestor in type(module).__mro__:
            if ancestor.__module__.startswith("torch.") and (advice := _WRAPPERS.get(ancestor.__name__)):
                raise UnsupportedError(f"{place} cannot be converted: {advice}.")
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedError(f"{place} is TorchScript and fixed: convert the Python module instead.")
        if module._compiled_call_impl is not None:
            raise UnsupportedError(
                f"{place} was compiled in place with .compile(), so Pyro would not see its parameters: "
                "convert a fresh module."
            )
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():  # type: ignore[misc]
            raise ModelError(
                f"{place} is lazy and has no weights yet: run the network once on a batch, then convert it."
            )
