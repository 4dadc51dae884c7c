# SPDX-License-Identifier: Apache-2.0
"""A recorded step with its surroundings, and the decision whether to compare it with an ordinary step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pyro_dvi.objectives.recorded_step import RecordedStep
from pyro_dvi.objectives.surroundings import Surroundings

_INTERVAL = 1000  # number of replays between two comparisons, once training is long


@dataclass(eq=False)
class Recording:
    """A recorded step with its surroundings.

    Attributes:
        key: everything else that determines the operators of a step.
        owners: model and guide, whose identities are in the key.
        unproven: number of replays since the last comparison.
        first_unproven: number of the training step of the first of these.
    """

    owners: tuple[Any, Any]
    key: Any
    surroundings: Surroundings
    step: RecordedStep
    batch: list[int]  # identities of the tensors of the batch with which the step was recorded
    uses: int = 0
    unproven: int = 0
    first_unproven: int = 0
    is_doubtful: bool = False  # True if the next replay must be compared
    elsewhere: bool = False  # True once the recording was compared on another batch
    # Processor time of replays and of ordinary steps.
    seconds: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._places = {id(tensor): k for k, tensor in enumerate(self.surroundings.tensors)}
        self._shared = [self._places.get(one) for one in self.batch]
        self._last = self.surroundings.tensors

    def fits(self, key: Any, batch: list[Tensor]) -> bool:
        """Return True if a step can be a replay of this recording."""
        if key != self.key or [self._places.get(id(tensor)) for tensor in batch] != self._shared:
            return False
        return self.surroundings.look() and self.step.is_current()

    def is_due(self, batch: list[Tensor]) -> bool:
        """Count a step; return True if its replay should be compared with an ordinary step."""
        self.uses += 1
        if self.uses & (self.uses - 1) == 0 or self.uses % _INTERVAL == 0 or self.is_doubtful:
            return True
        if self.surroundings.tensors is not self._last:
            return True
        return not self.elsewhere and self.batch != list(map(id, batch))

    def is_slower(self) -> bool:
        """Return True if the fastest replay takes clearly longer than the fastest ordinary step."""
        replays, ordinary = zip(*self.seconds, strict=True)
        return len(replays) > 4 and min(replays) > 1.1 * min(ordinary)

    def trust(self, batch: list[Tensor]) -> None:
        """Record that a comparison found no difference."""
        self.unproven, self.is_doubtful, self._last = 0, False, self.surroundings.tensors
        self.elsewhere = self.elsewhere or self.batch != list(map(id, batch))
