# SPDX-License-Identifier: Apache-2.0
"""A recorded step with its key and surroundings, and the decision whether to compare it with an ordinary step."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from pyro_dvi.core.batches import is_strided
from pyro_dvi.errors import UnsupportedError
from pyro_dvi.objectives.recorded_step import KINDS, RecordedStep
from pyro_dvi.objectives.surroundings import Surroundings, meta
from pyro_dvi.runs.posterior_run import Call

_INTERVAL = 1000  # number of replays between two comparisons, once training is long
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_NO_OVERRIDE = torch._C._disabled_torch_function_impl


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
        return len(replays) > 4 and min(replays) > 1.25 * min(ordinary)

    def trust(self, batch: list[Tensor]) -> None:
        """Record that a comparison found no difference."""
        self.unproven, self.is_doubtful, self._last = 0, False, self.surroundings.tensors
        self.elsewhere = self.elsewhere or self.batch != list(map(id, batch))


def key_of(call: Call, objective: Any) -> tuple[list[Tensor], Any]:
    """Return the tensors among the arguments, and a key of everything else that determines a step's operators.

    Raises:
        UnsupportedError: if a step with these arguments cannot be recorded.
    """
    if not call.kwargs and all(map(_is_plain_tensor, call.args)):
        batch, rest = list(call.args), None
    else:
        leaves, structure = tree_flatten((call.args, call.kwargs))
        batch = [leaf for leaf in leaves if _is_plain_tensor(leaf)]
        others = [leaf for leaf in leaves if not _is_plain_tensor(leaf)]
        strange = next((type(leaf).__name__ for leaf in others if not isinstance(leaf, _PLAIN)), None)
        if strange is not None:
            raise UnsupportedError(f"arguments of type {strange} cannot be recorded")
        rest = (structure, tuple(map(repr, others)))
    if not all(map(is_strided, batch)):
        raise UnsupportedError("sparse and nested tensors as arguments cannot be recorded")
    casts = tuple(torch.get_autocast_dtype(kind) for kind in KINDS if torch.is_autocast_enabled(kind))
    identities = list(map(id, batch))
    repeated = tuple(map(identities.index, identities))  # a recording merges repeated tensors
    who = _identity(call.model), _identity(call.guide), repeated
    metas, recorded_for = tuple(map(meta, batch)), objective.recorded_for(call.guide)
    return batch, (who, metas, rest, casts, torch.get_default_dtype(), recorded_for)


def _is_plain_tensor(value: Any) -> bool:
    """Return True for a tensor that does not override torch's functions."""
    kind = type(value)
    return kind is Tensor or getattr(kind, "__torch_function__", None) is _NO_OVERRIDE


def _identity(function: Any) -> tuple[int, Any]:
    """Return a key that is equal for two accesses of the same bound method."""
    if not isinstance(function, MethodType):
        return id(function), None
    return id(function.__self__), function.__func__
