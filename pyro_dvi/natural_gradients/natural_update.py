# SPDX-License-Identifier: Apache-2.0
"""The update of a natural-gradient optimizer: numbers of the step, then functions of torch on fixed memory."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyro_dvi.natural_gradients.estimates import NaturalSite, steps_of
from pyro_dvi.natural_gradients.site_update import AdamUpdate, SiteUpdate
from pyro_dvi.optim.launched_updates import GRADIENT, FixedUpdate, options_of

if TYPE_CHECKING:
    from pyro_dvi.natural_gradients.optimizer import NaturalGradientOptimizer


class NaturalUpdate(FixedUpdate):
    """The next update of an optimizer, of all its parameters that have a gradient."""

    def __init__(self, optimizer: NaturalGradientOptimizer) -> None:
        self._optimizer, state, groups = optimizer, optimizer.state, optimizer.param_groups
        moved = [(k, p) for k, group in enumerate(groups) for p in group["params"] if p.grad is not None]
        group_of = {id(p): k for k, p in moved}
        self._steps = steps_of(p for _, p in moved)
        sites, others = defaultdict[Any, list[NaturalSite]](list), defaultdict[Any, list[Tensor]](list)
        for step in self._steps:
            for site in step.sites:
                index = group_of.pop(id(site.loc), None)
                group_of.pop(id(site.precision), None)
                if index is not None:
                    # The tensors of a layer share their factors and are updated together.
                    layer = id(site.precision) if site.is_of_layer else None
                    sites[index, *_count(state, site.loc), step, layer].append(site)
        for index, p in moved:
            if id(p) in group_of:
                others[index, *_count(state, p)].append(p)
        self._sites = [
            SiteUpdate(part, [state[site.loc] for site in part], groups[index], step, count)
            for (index, count, _, step, _), part in sites.items()
        ]
        self._others = [
            AdamUpdate(rest, [state[p] for p in rest], groups[index], count)
            for (index, count, _), rest in others.items()
        ]
        self._all: list[SiteUpdate | AdamUpdate] = [*self._sites, *self._others]
        self.size = sum(len(one.numbers) for one in self._all)
        self._state, self._formulation = state, vars(optimizer).get("formulation")
        self._options, self._identities = options_of(groups), self._present()

    @classmethod
    def fixed(cls, optimizer: NaturalGradientOptimizer) -> NaturalUpdate | None:
        """Return the next update, or None if later updates will have other functions or use other memory."""
        update = cls(optimizer)
        is_fixed = [step.measured for step in update._steps] == [optimizer.wanted]
        return update if is_fixed and all(one.has_memory for one in update._all) else None

    def is_at_start(self, initial_batches: int) -> bool:
        """Return True if any site is in its first steps, whose functions are others."""
        return any(one.count <= initial_batches for one in self._sites)

    def _present(self) -> list[int]:
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        steps = (getattr(p, "natural_step", None) for p in parameters)
        sites = chain.from_iterable(site for step in self._steps for site in step.sites)
        memories = chain.from_iterable(self._state.get(p, {}).values() for p in parameters)
        held = (value for value in memories if isinstance(value, Tensor))
        return list(map(id, chain(parameters, map(GRADIENT, parameters), steps, sites, held)))

    def holds(self) -> bool:
        one = self._optimizer
        return (
            one.state is self._state
            and [step.measured for step in self._steps] == [one.wanted]
            and vars(one).get("formulation") is self._formulation
            and options_of(one.param_groups) == self._options
            and self._present() == self._identities
        )

    @property
    def tensors(self) -> list[Tensor | None]:  # type: ignore[override]
        return [tensor for update in self._all for tensor in update.tensors]

    @property
    def key(self) -> str:  # type: ignore[override]
        options, sizes = (
            options_of(one.group for one in self._sites),
            [len(one.parameters) for one in self._all],
        )
        return str((type(self._optimizer), self._formulation, options, sizes))

    def numbers(self) -> list[float]:
        optimizer, found = self._optimizer, list[float]()
        for one in self._all:
            one.set_count(one.memories[0].get("step", 0) + 1)
        for update in self._sites:
            optimizer.rate_factor, tempering = optimizer.factors(update.count, update.group)
            update.kl_weight = update.step.kl_weight * tempering
            update.set_numbers(optimizer._rates(update), optimizer.rate_factor)
            found += update.numbers
        for other in self._others:
            other.set_numbers(optimizer.deterministic_rate(other.count, other.group))
            found += other.numbers
        for one in self._all:
            for memory in one.memories:
                memory["step"] = one.count
        return found

    def run(self, numbers: Tensor | None = None) -> None:
        """Update the parameters, with these numbers or with those that were computed last."""
        if numbers is not None:
            parts = numbers.split([len(one.numbers) for one in self._all])
            for one, part in zip(self._all, parts, strict=True):
                one.numbers = type(one.numbers)(*part.to(one.parameters[0].dtype).unbind())
        for site in self._sites:
            site.begin()
            self._optimizer._move(site)
        for other in self._others:
            other.take()

    def finish(self) -> None:
        for update in self._sites:
            for precision in update.precisions:
                precision.grad = None
            update.step.wanted = self._optimizer.wanted


def _count(state: Any, parameter: Tensor) -> tuple[int, torch.dtype]:
    """Return the number of the next step, and the dtype that its numbers need."""
    return state[parameter].get("step", 0) + 1, parameter.dtype
