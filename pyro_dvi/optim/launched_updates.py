# SPDX-License-Identifier: Apache-2.0
"""Updates of torch optimizers that CUDA runs with a single launch.

An update can be captured if it reads and writes the same memory in each step. This is so if the gradients come from
captured training steps, and in many other cases, because torch reuses memory. All addresses are compared before a
launch. Numbers that change from step to step, such as the learning rate, are copied to the device.
"""

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from pyro_dvi.core.launch import LAUNCHING, FixedCall
from pyro_dvi.core.undisturbed import widest
from pyro_dvi.errors import UnsupportedError

_MOST = 8  # largest number of captured updates; more sets of addresses would mean that they do not recur
ADDRESS, GRADIENT = operator.methodcaller("data_ptr"), operator.attrgetter("grad")


class FixedUpdate(ABC):
    """The update of an optimizer as operators on fixed memory, given a few numbers.

    Attributes:
        tensors: all tensors that it reads or writes; None for a missing gradient.
        key: everything else that determines its operators, as text.
        size: how many numbers it needs.
    """

    tensors: list[Tensor | None]
    key: str
    size: int

    @abstractmethod
    def numbers(self) -> list[float]:
        """Count a step, and return the numbers that it needs."""

    @abstractmethod
    def run(self, numbers: Tensor) -> None:
        """Run the operators with these numbers, which are on the device."""

    def finish(self) -> None:  # noqa: B027 (most updates leave nothing behind)
        """Clean up after a step."""

    @abstractmethod
    def holds(self) -> bool:
        """Return True if the next update of the optimizer also has these tensors and this key."""


def options_of(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the options of an optimizer that are not numbers of a step."""
    return [{k: v for k, v in group.items() if k not in ("params", "lr")} for group in groups]


class AdamUpdate(FixedUpdate):
    """The update of torch's fused Adam or AdamW, whose step count is on the device already."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self._groups = optimizer, optimizer.param_groups
        self._states = optimizer.state
        self.tensors = list(self._present())
        self._options = options_of(self._groups)
        self.key, self.size = str(self._options), len(self._groups)

    def _present(self) -> Iterable[Tensor | None]:
        parameters = [p for group in self._groups for p in group["params"]]
        own = (self._states.get(p, {}).values() for p in parameters if p.grad is not None)
        return chain(parameters, map(GRADIENT, parameters), *own)

    def holds(self) -> bool:
        one = self._optimizer
        return (
            one.state is self._states
            and one.param_groups is self._groups
            and list(map(id, self._present())) == list(map(id, self.tensors))
            and options_of(self._groups) == self._options
            and not _is_other(one)
        )

    @classmethod
    def of(cls, optimizer: Optimizer) -> Self | None:
        """Return the update; None if the optimizer is another one, or has not taken a step with all parameters."""
        if _is_other(optimizer):
            return None
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        started = all(p.grad is None or optimizer.state.get(p) for p in parameters)
        return cls(optimizer) if started and all(p.dtype is torch.float32 for p in parameters) else None

    def numbers(self) -> list[float]:
        return [group["lr"] for group in self._groups]

    def run(self, numbers: Tensor) -> None:
        own = [(group, group["lr"], group["capturable"]) for group in self._groups]
        try:
            rates = numbers.to(torch.float32) if numbers.is_cuda else numbers  # as the kernels expect
            for group, rate in zip(self._groups, rates.unbind(), strict=True):
                group["lr"], group["capturable"] = rate, True
            self._optimizer.step()
        finally:
            for group, rate, capturable in own:
                group["lr"], group["capturable"] = rate, capturable


def _is_other(optimizer: Optimizer) -> bool:
    own: Any = vars(optimizer)
    if (
        type(optimizer) not in (Adam, AdamW)
        or own["_optimizer_step_pre_hooks"]
        or own["_optimizer_step_post_hooks"]
    ):
        return True
    return any(isinstance(group["lr"], Tensor) or not group["fused"] for group in optimizer.param_groups)


def fixed_update(optimizer: Any) -> FixedUpdate | None:
    """Return the update of an optimizer; None if it has none. An optimizer may define the method ``fixed_update``."""
    own = getattr(optimizer, "fixed_update", None)
    return AdamUpdate.of(optimizer) if own is None else own()  # type: ignore[no-any-return]


@dataclass
class _Captured:
    """A captured update."""

    updates: list[FixedUpdate]
    parameters: set[int]  # identities
    tensors: list[Tensor]
    addresses: list[int]
    call: FixedCall
    buffer: Tensor  # of the numbers
    numbers: list[float]

    def launch(self) -> None:
        numbers = [number for update in self.updates for number in update.numbers()]
        if numbers != self.numbers:
            self.numbers = numbers
            self.buffer.copy_(torch.tensor(numbers, dtype=self.buffer.dtype), non_blocking=True)
        self.call()
        for update in self.updates:
            update.finish()


class LaunchedUpdates:
    """The captured updates of a set of optimizers, one for each set of addresses."""

    def __init__(self) -> None:
        self._captured: dict[Any, _Captured | None] = {}
        self._seen: Any = None
        self._number = 0  # of captures
        self._last: _Captured | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def forget(self) -> None:
        """Make :meth:`again` return False until the next launch."""
        self._last = None

    def again(self, parameters: Iterable[Tensor]) -> bool:
        """Launch the last update again, and return True; return False if the next update may be another one."""
        last = self._last
        if (
            last is None
            or not last.call.is_valid
            or set(map(id, parameters)) != last.parameters
            or not all(update.holds() for update in last.updates)
            or list(map(ADDRESS, last.tensors)) != last.addresses
        ):
            return False
        last.launch()
        return True

    def take(self, optimizers: Sequence[Any], parameters: Sequence[Tensor], repeats: bool = True) -> bool:
        """Launch the update of all optimizers, and return True; return False if they have to take ordinary steps.

        Args:
            optimizers: torch optimizers.
            parameters: some of their parameters.
            repeats: whether :meth:`again` may follow, because gradients are not changed before an update.
        """
        self.forget()
        if not parameters or parameters[0].device.type not in LAUNCHING:
            return False
        updates = [update for one in optimizers if (update := fixed_update(one)) is not None]
        if len(updates) < len(optimizers):
            return False
        tensors = [tensor for update in updates for tensor in update.tensors]
        addresses = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
        key = addresses, tuple(update.key for update in updates)
        found = self._captured.get(key)
        if found is None or not found.call.is_valid:
            # New addresses, or an update that cannot be captured.
            if key != self._seen or key in self._captured or self._number == 4 * _MOST:
                self._seen = key
                return False
            self._number += 1
            found = _captured(updates, [t for t in tensors if t is not None])
            self._captured[key] = found
            if len(self._captured) > _MOST:
                del self._captured[next(iter(self._captured))]
            if found is None:
                return False
        found.updates, found.parameters = updates, set(map(id, parameters))
        found.tensors = [tensor for tensor in tensors if tensor is not None]
        self._last = found if repeats else None
        found.launch()
        return True


def _captured(updates: list[FixedUpdate], tensors: list[Tensor]) -> _Captured | None:
    device, lengths = tensors[0].device, [update.size for update in updates]
    buffer = torch.ones(sum(lengths), dtype=widest(device), device=device)

    def run() -> list[Tensor]:
        with torch.no_grad():
            for update, numbers in zip(updates, buffer.split(lengths), strict=True):
                update.run(numbers)
        return []

    def rehearse() -> list[Tensor]:
        before = [tensor.detach().clone() for tensor in tensors]
        run()
        # As .data, because a counted write to a constant would make recorded steps invalid.
        torch._foreach_copy_([tensor.data for tensor in tensors], before)
        return []

    try:
        call = FixedCall(run, rehearse, device)
    except UnsupportedError:
        return None
    return _Captured(updates, set(), tensors, list(map(ADDRESS, tensors)), call, buffer, [])
