# SPDX-License-Identifier: Apache-2.0
"""The order that a module's parameters had before some of them became sites or buffers.

Optimizers and exported modules rely on it. Each parameter that is moved elsewhere remembers its ``position``.
"""

from pyro.nn.module import PyroModule
from torch import nn

__all__ = ["FROZEN", "is_plain", "parameter_order"]

FROZEN = "_frozen_positions"
"""Attribute of a module that maps its frozen parameters, now buffers, to their positions."""


def is_plain(module: nn.Module, attribute: str) -> bool:
    """Whether ``attribute`` is an ordinary parameter, not the unconstrained half of a ``PyroParam``."""
    constrained = attribute.removesuffix("_unconstrained")
    return not (
        isinstance(module, PyroModule) and constrained != attribute and constrained in module._pyro_params
    )


def parameter_order(module: nn.Module) -> list[str]:
    """Return the names of a module's own parameters, moved ones included, in their original order."""
    names = [name for name in module._parameters if is_plain(module, name)]
    priors = getattr(module, "_pyro_samples", {})
    moved = {name: prior.position for name, prior in priors.items() if hasattr(prior, "position")}
    moved |= module.__dict__.get(FROZEN, {})
    for name in sorted(moved, key=moved.__getitem__):
        names.insert(moved[name], name)
    return names
