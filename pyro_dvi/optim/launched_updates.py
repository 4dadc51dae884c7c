# SPDX-License-Identifier: Apache-2.0
"""Updates of torch optimizers that CUDA runs with a single launch.

An update can be captured if it reads and writes the same memory in each step. This is so if the gradients come from
captured training steps, and in many other cases, because torch reuses memory. All addresses are compared before a
launch. Numbers that change from step to step, such as the learning rate, are copied to the device.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from pyro_dvi.core.launch import LAUNCHING, FixedCall
from pyro_dvi.core.undisturbed import widest
from pyro_dvi.errors import UnsupportedError

_MOST = 8  # largest number of captured updates; more sets of addresses would mean that they do not recur


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


class AdamUpdate(FixedUpdate):
    """The update of torch's fused Adam or AdamW, whose step count is on the device already."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self._groups = optimizer, optimizer.param_groups
        parameters = [p for group in self._groups for p in group["params"]]
        states = [optimizer.state[p].values() for p in parameters if p.grad is not None]
        self.tensors = [*parameters, *(p.grad for p in parameters), *chain.from_iterable(states)]
        options = [[v for k, v in group.items() if k not in ("params", "lr")] for group in self._groups]
        self.key, self.size = str(options), len(self._groups)

    @classmethod
    def of(cls, optimizer: Optimizer) -> Self | None:
        """Return the update; None if the optimizer is another one, or has not taken a step with all parameters."""
        own: Any = vars(optimizer)
        hooks = own["_optimizer_step_pre_hooks"] or own["_optimizer_step_post_hooks"]
        if type(optimizer) not in (Adam, AdamW) or hooks:
            return None
        for group in optimizer.param_groups:
            if not group["fused"] or isinstance(group["lr"], Tensor):
                return None
            for p in group["params"]:
                if p.dtype is not torch.float32 or (p.grad is not None and not optimizer.state.get(p)):
                    return None
        return cls(optimizer)

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


def fixed_update(optimizer: Any) -> FixedUpdate | None:
    """Return the update of an optimizer; None if it has none. An optimizer may define the method ``fixed_update``."""
    own = getattr(optimizer, "fixed_update", None)
    return AdamUpdate.of(optimizer) if own is None else own()  # type: ignore[no-any-return]


class LaunchedUpdates:
    """The captured updates of a set of optimizers, one for each set of addresses."""

    def __init__(self) -> None:
        self._captured: dict[Any, tuple[FixedCall, Tensor, list[float]] | None] = {}
        self._last: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def take(self, optimizers: Sequence[Any], parameters: Sequence[Tensor]) -> bool:
        """Launch the update of all optimizers, and return True; return False if they have to take ordinary steps.

        Args:
            optimizers: torch optimizers.
            parameters: some of their parameters.
        """
        if not parameters or parameters[0].device.type not in LAUNCHING:
            return False
        updates = [update for one in optimizers if (update := fixed_update(one)) is not None]
        if len(updates) < len(optimizers):
            return False
        tensors = [tensor for update in updates for tensor in update.tensors]
        addresses = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
        key = addresses, tuple(update.key for update in updates)
        found = self._captured.get(key)
        if found is None or not found[0].is_valid:
            if (
                key != self._last or key in self._captured
            ):  # new addresses, or an update that cannot be captured
                self._last = key
                return False
            found = self._capture(updates, [t for t in tensors if t is not None])
            self._captured[key] = found
            if len(self._captured) > _MOST:
                del self._captured[next(iter(self._captured))]
            if found is None:
                return False
        call, buffer, known = found
        numbers = [number for update in updates for number in update.numbers()]
        if numbers != known:
            known[:] = numbers
            buffer.copy_(torch.tensor(numbers, dtype=buffer.dtype), non_blocking=True)
        call()
        for update in updates:
            update.finish()
        return True

    @staticmethod
    def _capture(
        updates: list[FixedUpdate], tensors: list[Tensor]
    ) -> tuple[FixedCall, Tensor, list[float]] | None:
        device = tensors[0].device
        lengths = [update.size for update in updates]
        buffer = torch.ones(sum(lengths), dtype=widest(device), device=device)

        def run() -> list[Tensor]:
            with torch.no_grad():
                for update, numbers in zip(updates, buffer.split(lengths), strict=True):
                    update.run(numbers)
            return []

        def rehearse() -> list[Tensor]:
            before = [tensor.detach().clone() for tensor in tensors]
            run()
            with torch.no_grad():
                torch._foreach_copy_(tensors, before)
            return []

        try:
            return FixedCall(run, rehearse, device), buffer, []
        except UnsupportedError:
            return None
