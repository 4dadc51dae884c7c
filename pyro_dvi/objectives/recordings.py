# SPDX-License-Identifier: Apache-2.0
"""A recorded step with its surroundings, and the decision whether to compare it with an ordinary step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pyro_dvi.objectives.recorded_step import RecordedStep
from pyro_dvi.objectives.surroundings import Surroundings, meta

_INTERVAL = 1000  # number of replays between two comparisons, once training is long


@dataclass(eq=False)
class Recording:
    """A recorded step with its surroundings."""

    owners: tuple[Any, Any]  # model and guide, whose identities are in the key
    key: Any
    surroundings: Surroundings
    metas: list[Any]
    step: RecordedStep
    last: list[Tensor]  # the tensors of the surroundings at the last comparison
    batch: list[int]  # identities of the tensors of the batch with which the step was recorded
    uses: int = 0
    elsewhere: bool = False  # True once the recording was compared on another batch
    seconds: list[tuple[float, float]] = field(
        default_factory=list
    )  # thread time of replays and of ordinary steps

    def __post_init__(self) -> None:
        self.places = {id(tensor): k for k, tensor in enumerate(self.last)}
        self.shared = [self.places.get(one) for one in self.batch]

    def tensors_for(self, key: Any, batch: list[Tensor]) -> list[Tensor] | None:
        """Return the tensors that the recorded step uses besides the batch; None if the recording does not fit."""
        if key != self.key or [self.places.get(id(tensor)) for tensor in batch] != self.shared:
            return None
        tensors = self.surroundings.tensors()
        if (
            tensors is None
            or self.surroundings.changed() is not None
            or list(map(meta, tensors)) != self.metas
            or any(tensor._version != version for tensor, version in self.step.found)
        ):
            return None
        return tensors

    def is_due(self, tensors: list[Tensor], batch: list[Tensor]) -> bool:
        """Count a step; return True if its replay should be compared with an ordinary step."""
        self.uses += 1
        if self.uses & (self.uses - 1) == 0 or self.uses % _INTERVAL == 0:
            return True
        if any(a is not b for a, b in zip(tensors, self.last, strict=True)):
            return True
        return not self.elsewhere and self.batch != list(map(id, batch))

    def is_slower(self) -> bool:
        """Return True if the fastest replay takes clearly longer than the fastest ordinary step."""
        replays, ordinary = zip(*self.seconds, strict=True)
        return len(replays) > 4 and min(replays) > 1.1 * min(ordinary)

    def trust(self, tensors: list[Tensor], batch: list[Tensor]) -> None:
        """Record that a comparison found no difference."""
        self.last = tensors
        self.elsewhere = self.elsewhere or self.batch != list(map(id, batch))
