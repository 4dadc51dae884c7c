# SPDX-License-Identifier: Apache-2.0
"""The minibatches of a loader; those of a ``TensorDataset`` are gathered by one operator for each tensor.

A loader collects a minibatch row by row in Python, which takes longer than a step of a small network. Gathering gives
the same minibatches, in the same order and with the same random numbers.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Subset, TensorDataset, default_collate

from pyro_dvi.core.in_turn import in_turn

_ROWS = 1 << 16  # number of rows whose positions are copied to the device at once


class Minibatches:
    """The minibatches of a loader.

    Args:
        loader: a loader; only a plain ``DataLoader`` of a ``TensorDataset``, or of a ``Subset`` of one, is gathered.
        on_device: True to copy the whole data set to the device of the model, and gather there.

    Example:
        >>> loader = DataLoader(TensorDataset(torch.arange(5)), batch_size=2)
        >>> list(Minibatches(loader, on_device=False).of_epoch(None))
        [[tensor([0, 1])], [tensor([2, 3])], [tensor([4])]]
    """

    def __init__(self, loader: Iterable[Any], on_device: bool) -> None:
        self._loader, self._on_device = loader, on_device
        # On the device, with the originals and their versions.
        self._copies: dict[int, tuple[Tensor, int, Tensor]] = {}

    def of_epoch(self, device: torch.device | None) -> Iterator[Any]:
        """Yield the minibatches of one epoch for a model on a device."""
        found = _tensors_of(self._loader)
        if found is None:
            yield from in_turn.passed_for(self._loader)
            return
        tensors, positions = found
        if self._on_device and device is not None:
            tensors = [self._copy(tensor, device) for tensor in tensors]
        where = tensors[0].device
        positions = None if positions is None else positions.to(where)
        batches = iter(self._loader)._sampler_iter  # type: ignore[attr-defined] # draws what a loader draws
        for first in batches:
            some = [first, *islice(batches, _ROWS // len(first))]
            rows = torch.tensor([row for batch in some for row in batch]).to(where)
            rows = rows if positions is None else positions[rows]
            for part in in_turn.passed_for(rows.split([len(batch) for batch in some])):
                yield [tensor[part] for tensor in tensors]

    def _copy(self, tensor: Tensor, device: torch.device) -> Tensor:
        if tensor.device == device:
            return tensor
        _, version, copy = self._copies.get(id(tensor), (tensor, -1, tensor))
        if version != tensor._version or copy.device != device:
            copy = tensor.to(device)
            self._copies[id(tensor)] = tensor, tensor._version, copy
        return copy


def _tensors_of(loader: Any) -> tuple[list[Tensor], Tensor | None] | None:
    """Return the tensors of a loader's data set, and the rows of a subset; None if minibatches cannot be gathered."""
    if type(loader) is not DataLoader or loader.num_workers or loader.collate_fn is not default_collate:
        return None
    # A sampler of one's own may depend on the training so far.
    own = type(loader.sampler).__module__.partition(".")[0] not in ("torch", "builtins")
    if own or type(loader.batch_sampler) is not BatchSampler:
        return None
    data, positions = loader.dataset, None
    while type(data) is Subset:
        rows = torch.as_tensor(data.indices)
        data, positions = data.dataset, rows if positions is None else rows[positions]
    if type(data) is not TensorDataset or len({tensor.device for tensor in data.tensors}) != 1:
        return None
    plain = all(type(tensor) is Tensor and not tensor.requires_grad for tensor in data.tensors)
    return (list(data.tensors), positions) if plain and len(data) else None
