# SPDX-License-Identifier: Apache-2.0
"""Let a converted module load the checkpoints of the module that it was."""

from collections import OrderedDict
from typing import Any

from torch import Tensor, nn

from pyro_dvi.bayesian.site_prior import SitePrior, TiedPrior, buffer_name

__all__ = ["accept_old_keys", "forget_old_keys"]


def accept_old_keys(module: nn.Module) -> None:
    """Make ``module.load_state_dict`` read ``weight`` where it now keeps ``weight_initial``."""
    if not any(_is_ours(hook) for hook in module._load_state_dict_pre_hooks.values()):
        module.register_load_state_dict_pre_hook(_rename_old_keys)


def forget_old_keys(module: nn.Module) -> None:
    """Take :func:`accept_old_keys` back."""
    for key, hook in list(module._load_state_dict_pre_hooks.items()):
        if _is_ours(hook):
            del module._load_state_dict_pre_hooks[key]


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
