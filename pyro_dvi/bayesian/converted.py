# SPDX-License-Identifier: Apache-2.0
"""What a converted module keeps of the one that it was: class, order of parameters, frozen ones, names in checkpoints.

Optimizers and exported modules rely on the order. Frozen parameters become buffers of the same name, because Pyro sets
``requires_grad`` on every parameter that a Pyro module reads; checkpoints fit as before and no optimizer sees them.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from pyro.nn.module import PyroModule, _PyroModuleMeta
from torch import Tensor, nn

from pyro_dvi.bayesian.site_prior import SitePrior, TiedPrior, buffer_name

_ATTRIBUTE = "_before_conversion"


@dataclass
class _Before:
    """The names of a module's own parameters when it was converted, and of those that were frozen."""

    order: list[str] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)


def remember(root: nn.Module) -> None:
    """Note the order of the parameters of all modules below ``root``, and turn the frozen ones into buffers."""
    for module in root.modules():
        before = module.__dict__.setdefault(_ATTRIBUTE, _Before())
        before.order = parameter_order(module)  # anew in a second conversion: there may be more of them since
        for name, parameter in list(module._parameters.items()):
            if parameter is None or parameter.requires_grad or not _is_plain(module, name):
                continue
            del module._parameters[name]
            module.register_buffer(name, parameter.detach())
            before.frozen.append(name)


def forget(module: nn.Module) -> None:
    """Make frozen parameters of the buffers again, and drop what else :func:`remember` and the conversion noted."""
    before = module.__dict__.pop(_ATTRIBUTE, None)
    for name in [] if before is None else before.frozen:
        value = module._buffers.pop(name)
        assert value is not None
        module._parameters[name] = nn.Parameter(value, requires_grad=False)
    for key, hook in list(module._load_state_dict_pre_hooks.items()):
        if _is_ours(hook):
            del module._load_state_dict_pre_hooks[key]


def parameter_order(module: nn.Module) -> list[str]:
    """Return the names of a module's own parameters, converted and frozen ones included, in their original order."""
    present = [name for name in module._parameters if _is_plain(module, name)]
    before = module.__dict__.get(_ATTRIBUTE)
    if before is None:
        return present
    priors = getattr(module, "_pyro_samples", {})
    moved = {name for name in before.order if isinstance(priors.get(name), SitePrior)}
    known = [name for name in before.order if name in {*present, *moved, *before.frozen}]
    return [*known, *(name for name in present if name not in known)]


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
    made = _PyroModuleMeta._pyro_mixin_cache
    return next((plain for plain, converted in made.items() if converted is kind), None)


def accept_old_keys(module: nn.Module) -> None:
    """Make ``module.load_state_dict`` read ``weight`` where it now keeps ``weight_initial``."""
    if not any(_is_ours(hook) for hook in module._load_state_dict_pre_hooks.values()):
        module.register_load_state_dict_pre_hook(_rename_old_keys)


def _is_plain(module: nn.Module, attribute: str) -> bool:
    """Whether ``attribute`` is an ordinary parameter, not the unconstrained half of a ``PyroParam``."""
    constrained = attribute.removesuffix("_unconstrained")
    return constrained == attribute or constrained not in getattr(module, "_pyro_params", {})


def _is_ours(hook: object) -> bool:
    return getattr(hook, "hook", hook) is _rename_old_keys


def _rename_old_keys(module: nn.Module, state: "OrderedDict[str, Tensor]", prefix: str, *unused: Any) -> None:
    """Rename the keys of converted parameters; the mapping is a copy of the caller's."""
    old_checkpoint = False
    for attribute, prior in getattr(module, "_pyro_samples", {}).items():
        if not isinstance(prior, SitePrior) or prefix + attribute not in state:
            continue
        old_checkpoint = True
        value = state.pop(prefix + attribute)
        if not isinstance(prior, TiedPrior):  # the owner's key holds the same value
            state.setdefault(prefix + buffer_name(attribute), value)
    if old_checkpoint:
        # Learned scales are newer than the checkpoint: they stay as they are.
        for name, parameter in module._parameters.items():
            if parameter is not None and name.endswith("_scale_unconstrained"):
                state.setdefault(prefix + name, parameter.detach())
