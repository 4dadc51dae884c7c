# SPDX-License-Identifier: Apache-2.0
"""What the optimizer that an objective serves wants measured."""

from typing import Any

import pyro
from torch import Tensor

from pyro_dvi.errors import GuideError
from pyro_dvi.natural_state import Statistics

__all__ = ["check_served", "wanted_by"]


def check_served(optimizer: Any) -> None:
    """Refuse optimizers that know nothing of natural gradients.

    Raises:
        GuideError: naming the optimizers that do.
    """
    if not hasattr(_torch_class(optimizer), "wanted"):
        raise GuideError(
            f"{type(optimizer).__name__} of {getattr(_torch_class(optimizer), '__name__', 'unknown')} cannot train by "
            "NaturalGradientELBO, whose gradients lack the prior: take pyro_dvi.optim.VOGN, OGN or IVON (VOGNOptimizer "
            "and its sisters for elbo(model, guide)); a wrapper around one of them forwards its attributes wanted and "
            "wanted_for"
        )


def wanted_by(optimizer: Any, leaf: Tensor) -> Statistics:
    """Return what an optimizer of Pyro or torch wants measured for a parameter of means in its next step."""
    if not hasattr(optimizer, "pt_optim_constructor"):
        wanted: Statistics = optimizer.wanted_for(leaf)
        return wanted
    made = optimizer.optim_objs.get(leaf)
    if made is None:
        if pyro.get_param_store().param_name(leaf) in optimizer._state_waiting_to_be_consumed:
            wanted = _torch_class(optimizer).wanted
            return wanted
        made = optimizer._get_optim(leaf)  # the options may differ between parameters
    wanted = getattr(made, "optimizer", made).wanted_for(leaf)  # a scheduler's
    return wanted


def _torch_class(optimizer: Any) -> Any:
    return getattr(optimizer, "pt_optim_constructor", type(optimizer))
