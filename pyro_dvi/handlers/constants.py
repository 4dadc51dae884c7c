# SPDX-License-Identifier: Apache-2.0
"""What a run of a model uses besides latents and data: deterministic weights, running statistics, pyro.param."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn

from pyro_dvi.devices import widest

__all__ = ["Sums", "constants_read", "first_changed", "sums_of"]

Sums = dict[str, list[tuple[float, float]]]  # sum and norm of the tensors of each name, in the order of a run

_TOLERANCE = 1e-6  # of the norm: rounding of another dtype or device changes less, a step of training more


class _Constants(Messenger):
    """Collect tensors by name; those of modules are found by a hook, wherever a plain function calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[Tensor]] = {}
        self._seen: set[int] = set()

    def _pyro_post_param(self, msg: Any) -> None:
        self._note(msg["name"], msg["value"])

    def look(self, module: nn.Module, _inputs: object) -> None:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        passing = module._non_persistent_buffers_set  # caches, such as those of positions
        buffers = ((n, b) for n, b in module.named_buffers(recurse=False) if n not in passing)
        for name, tensor in chain(module.named_parameters(recurse=False), buffers):
            self._note(f"{type(module).__name__}.{name}", tensor)

    def _note(self, name: str, tensor: Tensor) -> None:
        if tensor.is_floating_point() and tensor.numel() > 0:
            self.found.setdefault(f"{name} {tuple(tensor.shape)}", []).append(tensor.detach())


@contextmanager
def constants_read() -> Iterator[dict[str, list[Tensor]]]:
    """Collect the constants of the runs inside the block, by name and shape.

    Example:
        >>> with constants_read() as found:
        ...     _ = nn.Linear(2, 1, bias=False)(torch.ones(2))
        >>> list(found)
        ['Linear.weight (1, 2)']
    """
    constants = _Constants()
    handle = nn.modules.module.register_module_forward_pre_hook(constants.look)
    try:
        with constants:
            yield constants.found
    finally:
        handle.remove()


@torch.no_grad()
def sums_of(found: Mapping[str, list[Tensor]]) -> Sums:
    """Return two numbers for each tensor, by which a change of it shows."""
    tensors = [tensor for group in found.values() for tensor in group]
    if not tensors:
        return {}
    device = tensors[0].device
    sums = [torch.stack([t.sum(dtype=widest(t.device)), _norm(t)]).to(device) for t in tensors]
    numbers = iter(torch.stack(sums).tolist())
    return {name: [tuple(next(numbers)) for _ in group] for name, group in found.items()}


def _norm(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=widest(tensor.device))
    return norm


def first_changed(before: Sums, after: Sums) -> str | None:
    """Return the first constant that both have and that differs; None if all agree."""
    for name in before.keys() & after.keys():
        old, new = before[name], after[name]
        if len(old) == len(new):
            same = all(map(_close, old, new))
        else:  # one run calls more modules of a kind than the other
            same = all(any(_close(a, b) for a in old) for b in new)
        if not same:
            return name
    return None


def _close(a: tuple[float, float], b: tuple[float, float]) -> bool:
    return all(abs(x - y) <= _TOLERANCE * max(a[1], 1e-30) for x, y in zip(a, b, strict=True))
