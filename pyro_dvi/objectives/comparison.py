# SPDX-License-Identifier: Apache-2.0
"""Comparison of a replay with ordinary steps from the same state."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from pyro_dvi.core.undisturbed import accelerators, forked
from pyro_dvi.objectives.recorded_step import Outcome, RecordedStep, random_states

_SPREADS = (
    5.0  # a replay may differ from an ordinary step by this many differences between two ordinary steps
)


@dataclass
class Trial:
    """A replay that will be compared with an ordinary step from the same state.

    Attributes:
        outcome: outcome of the replay.
        inputs: inputs after the replay; inputs that the replay writes to are copies.
        versions: versions of these inputs.
        random_states: random states after the replay.
        seconds: processor time of the replay.
    """

    outcome: Outcome
    inputs: list[Tensor]
    versions: list[int]
    random_states: list[Tensor]
    seconds: float

    @classmethod
    def of(cls, step: RecordedStep, inputs: list[Tensor], kl_weight: Tensor) -> Trial:
        """Replay a step, and restore buffers and random states."""
        before = {k: inputs[k].clone() for k in step.written}
        with forked(*accelerators()), torch.no_grad():
            start = time.thread_time()
            try:
                outcome = step.replay(inputs, kl_weight).kept()
                after = [inputs[k].clone() if k in before else value for k, value in enumerate(inputs)]
            finally:
                for k, value in before.items():
                    inputs[k].copy_(value)
            seconds = time.thread_time() - start
            return cls(outcome, after, [value._version for value in after], random_states(), seconds)

    def disagreement(
        self, ordinary: Outcome, inputs: list[Tensor], again: Outcome | None = None
    ) -> str | None:
        """Return how the replay differs from an ordinary step, which has changed ``inputs``; None if it does not.

        Args:
            ordinary: outcome of the ordinary step.
            inputs: inputs after the ordinary step.
            again: outcome of a second ordinary step from the same state, whose difference from the first shows how far
                results of this device vary by themselves.
        """
        mine, known = self.outcome, {id(leaf) for leaf in self.outcome.leaves}
        if any(id(leaf) not in known for leaf in ordinary.leaves):
            return "a new parameter appears"
        versions = zip(self.inputs, inputs, self.versions, strict=True)
        if any(a is b and a._version != version for a, b, version in versions):
            return "a buffer differs in a replay"
        record, structure = tree_flatten(mine.record)
        other, other_structure = tree_flatten(ordinary.record)
        if structure != other_structure:
            return "measurements differ in a replay"
        pairs = list(_results(mine, mine.leaves, mine.terms, ordinary))
        spreads = [0.0] * len(pairs)
        if again is not None:
            spreads = [_difference(a, b) for _, a, b in _results(again, mine.leaves, mine.terms, ordinary)]
        for name, one, another in (
            *(("a buffer", a, b) for a, b in zip(self.inputs, inputs, strict=True)),
            *(("the random state", a, b) for a, b in zip(self.random_states, random_states(), strict=True)),
            *(("a measurement", a, b) for a, b in zip(record, other, strict=True)),
        ):
            pairs.append((name, one, another))
            spreads.append(0.0)
        sizes = [float(b.detach().norm()) for what, _, b in pairs if what not in _STATES and b is not None]
        for (what, one, another), spread in zip(pairs, spreads, strict=True):
            if not _agree(one, another, max(sizes), spread):
                return f"{what} differs in a replay"
        return None


_STATES = ("a buffer", "the random state", "a measurement")


def _results(
    outcome: Outcome, leaves: list[Tensor], names: dict[str, Tensor], reference: Outcome
) -> Iterator[tuple[str, Any, Any]]:
    """Yield terms and gradients of two outcomes side by side."""
    found, other = (
        {id(leaf): g for leaf, g in zip(o.leaves, o.gradients, strict=True)} for o in (outcome, reference)
    )
    yield from ((name, outcome.terms.get(name), reference.terms.get(name)) for name in names)
    yield from (("a gradient", found.get(id(leaf)), other.get(id(leaf))) for leaf in leaves)


def _difference(one: Any, other: Any) -> float:
    return float((one - other).detach().norm()) if one is not None and other is not None else 0.0


def _agree(one: Any, other: Any, largest: float, spread: float) -> bool:
    """Return True if two results are equal: bitwise on the CPU, or up to rounding where sums have no fixed order.

    Args:
        one: a result.
        other: the other result.
        largest: norm of the largest gradient or term; results that are tiny relative to it may be rounding errors.
        spread: difference between two ordinary steps.
    """
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return one is other or bool(one == other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point() or one.device.type == "cpu":
        return torch.equal(one, other)
    one, other, eps = one.detach(), other.detach(), torch.finfo(one.dtype).eps
    size = float(other.norm())
    return float((one - other).norm()) <= eps**0.5 * size + 10 * eps * largest + _SPREADS * spread
