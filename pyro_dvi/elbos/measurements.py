# SPDX-License-Identifier: Apache-2.0
"""What an objective measures for the optimizer that it serves, kept until that has used it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pyro
from torch import Tensor

from pyro_dvi.errors import GuideError
from pyro_dvi.natural_state import NaturalState, Statistics, attach, natural_state_of, wanted_of

__all__ = ["Measurements"]


class Measurements:
    """The measurements of the last step, and who is to use them."""

    def __init__(self) -> None:
        self._optimizer: Any = None
        self._guide_id: int | None = None
        self._opened: dict[int, NaturalState] = {}

    def serve(self, optimizer: Any) -> Any:
        """Measure for this optimizer; return the one before.

        Raises:
            GuideError: it knows nothing of natural gradients.
        """
        if optimizer is not None:
            _check_served(optimizer)
        self.drop()
        before, self._optimizer = self._optimizer, optimizer
        return before

    def wanted(self, leaf: Tensor) -> Statistics:
        """Return what is to be measured for a parameter of means."""
        return wanted_of(leaf) if self._optimizer is None else _wanted_by(self._optimizer, leaf)

    def refuse_unused(self, guide: Callable) -> None:
        """Refuse to measure again as long as nobody has used what was measured last.

        Raises:
            GuideError: naming the ways out.
        """
        if self._guide_id == id(guide) and any(state.is_fresh for state in self._opened.values()):
            raise GuideError(
                "the gradients of the last step were not used by a natural-gradient optimizer: train with "
                "pyro_dvi.optim.VOGN, OGN or IVON, and take a step after each backward pass. To go on after a backward "
                "pass without a step, drop its measurements by elbo.serve(optimizer)."
            )

    def begin(self, guide: Callable) -> bool:
        """Begin a step; return whether the last one was of the same guide."""
        same = self._guide_id == id(guide)
        self._guide_id, self._opened = id(guide), {}
        return same

    def open(
        self,
        leaf: Tensor,
        precision: Callable[[], Tensor],
        prior: tuple[Tensor, Tensor],
        measured: Statistics,
    ) -> NaturalState:
        """Return the state of a parameter of means, ready for new measurements.

        Args:
            leaf: the parameter.
            precision: gives the parameter of precisions, if there is no state yet.
            prior: mean and precision of the prior.
            measured: what will be measured.
        """
        state = natural_state_of(leaf)
        if state is None:
            state = NaturalState(precision(), *prior)
            attach(leaf, state)
        elif id(state) not in self._opened:
            state.clear()  # what another objective may have left
        self._opened[id(state)] = state
        state.prior_loc, state.prior_precision = prior
        state.measured = measured
        return state

    def note_factor(self, loss: Tensor) -> None:
        """Keep what the loss is multiplied with, which its own gradient tells before all others come by."""
        if self._opened:
            loss.register_hook(partial(_note_factor, list(self._opened.values())))

    def drop(self) -> None:
        """Forget what was measured in the last step."""
        for state in self._opened.values():
            state.clear()


def _note_factor(states: list[NaturalState], gradient: Tensor) -> None:
    for state in states:
        state.loss_factor = gradient.detach()


def _check_served(optimizer: Any) -> None:
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


def _wanted_by(optimizer: Any, leaf: Tensor) -> Statistics:
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
