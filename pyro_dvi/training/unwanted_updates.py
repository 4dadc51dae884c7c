# SPDX-License-Identifier: Apache-2.0
"""What an optimizer does to gradients and posterior scales though the objective does not ask for it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from pyro_dvi.errors import warn
from pyro_dvi.optim.learning_rates import SCALE_PATTERN
from pyro_dvi.training.routes import Route

LARGEST_SHARE = 0.05  # of the elements of gradients, that a clamp may change without a word


@contextmanager
def unwanted_updates_noticed(route: Route) -> Iterator[None]:
    """Watch the steps of an epoch, and warn after it of a clamp that changes many gradients, and of decaying scales.

    A clamp is ``clip_norm`` of Pyro's ``ClippedAdam``, which bounds single elements despite its name, or
    ``clip_value`` of the ``clip_args`` of any other. The numbers stay on their device until the epoch ends.
    """
    clip_args = getattr(route.steered, "pt_clip_args", None)
    clamp = _Clamp(clip_args.get("clip_value") if isinstance(clip_args, dict) else None)
    handle = register_optimizer_step_pre_hook(clamp.look)
    try:
        yield
    finally:
        handle.remove()
    if clamp.share > LARGEST_SHARE:
        warn(
            f"{route.optimizer_name} clamps the elements of gradients to ±{clamp.bound:g}, which changed "
            f"{clamp.share:.0%} of them in this epoch. Losses are sums over the data set, and their gradients are as "
            "large: clamped, training ends elsewhere, or late. Take dvi.optim.Adam(dvi.learning_rates(1e-2)), or "
            "multiply the bound by the number of examples."
        )
    decayed = [
        name
        for name, optimizer, place in route.optimizer_groups()
        if optimizer.param_groups[place].get("weight_decay") and re.search(SCALE_PATTERN, name)
    ]
    if decayed:
        warn(
            f"The weight decay of {route.optimizer_name} acts on {decayed[0]!r}, posterior scales on a logarithmic "
            "axis, and pulls them to a value near 1 whatever the data say. The prior of the model decays the weights "
            "already: leave it out."
        )


class _Clamp:
    """On how many elements of gradients a clamp acts."""

    def __init__(self, bound: float | None) -> None:
        self.bound = bound
        self.acted: Tensor | float = 0.0
        self.elements = 0

    def look(self, optimizer: Optimizer, *arguments: Any) -> None:
        """Count, before a step of the optimizer; an element that is clamped already equals the bound."""
        for group in optimizer.param_groups:
            self.bound = bound = group.get("clip_norm", self.bound)
            for parameter in () if bound is None else group["params"]:
                if parameter.grad is not None:
                    self.acted = self.acted + (parameter.grad.abs() >= bound).sum()
                    self.elements += parameter.grad.numel()

    @property
    def share(self) -> float:
        """The share of all elements; this reads a value from the device."""
        return float(self.acted) / self.elements if self.elements else 0.0
