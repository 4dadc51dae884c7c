# SPDX-License-Identifier: Apache-2.0
"""Go through the same data again and again, and notice when they are not the same."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from pyro_dvi.batches import arguments, check_loader, tensors_in
from pyro_dvi.devices import widest
from pyro_dvi.errors import DataError

__all__ = ["Passes", "same_data"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Passes:
    """Repeated passes over fixed batches.

    A checksum of every pass, which does not depend on the order of the rows, is compared with that of the first:
    solvers would average over data that are augmented at random or drawn with replacement, without any sign of it.

    Args:
        batches: a loader or a list of batches, each a tuple of the model's arguments or a mapping of them.
        device: where to bring the tensors.

    Attributes:
        reordered: a pass had the rows in another order than the first.
    """

    def __init__(self, batches: Iterable[Any], device: torch.device | None) -> None:
        check_loader(batches, passes=2, role="batches")
        self.batches = batches
        self.device = device
        self._first: tuple[int, float] | None = None
        self._order: list[float] = []
        self._known = WeakIdKeyDictionary()
        self.reordered = False

    @property
    def checksum(self) -> float | None:
        """That of the rows, in whatever order; None before the first whole pass."""
        return None if self._first is None else self._first[1]

    def __iter__(self) -> Iterator[Arguments]:
        """Yield the arguments of every batch.

        Raises:
            DataError: the loader yields nothing, or other data than the first time.
        """
        count, total = 0, 0.0
        for batch in self.batches:
            found = arguments(batch, self.device)
            sums = list(map(self._checksums, tensors_in(batch), tensors_in(found)))
            total += sum(anyhow for anyhow, _ in sums)
            self._compare_order(count, sum(ordered for _, ordered in sums))
            count += 1
            yield found
        if count == 0:
            raise DataError("batches is empty: it has no batches")
        if self._first is None:
            self._first = count, total
        elif not same_data(self._first[1], total):
            raise DataError(
                "the batches changed between two passes over the data. Solves need the same data each time: no random "
                "augmentation, sampling with replacement, or drop_last of a shuffled loader. list(loader) fixes one "
                "pass."
            )

    def _checksums(self, given: Tensor, placed: Tensor) -> tuple[float, float]:
        """Those of a tensor; a list of batches gives the same tensors in each pass, which are looked at once."""
        version = None if given.is_inference() else given._version  # counts changes in place
        known, sums = self._known.get(given, (None, (0.0, 0.0)))
        if known is None or known != version:
            sums = _checksums(placed)
            self._known[given] = version, sums
        return sums

    def _compare_order(self, index: int, ordered: float) -> None:
        if index == len(self._order) and self._first is None:
            self._order.append(ordered)
        elif index >= len(self._order) or abs(ordered - self._order[index]) > 1e-6 * max(1.0, abs(ordered)):
            self.reordered = True


def same_data(first: float | None, other: float | None) -> bool:
    """Say whether two checksums are those of the same rows; not, where one is unknown."""
    return first is not None and other is not None and abs(other - first) <= 1e-6 * max(1.0, abs(first))


def _checksums(tensor: Tensor) -> tuple[float, float]:
    """A nonlinear sum over rows, so that rows may change places but not mix; and one in which they may not."""
    if tensor.numel() == 0 or tensor.is_complex():
        return float(tensor.numel()), 0.0
    rows = tensor.detach().reshape(len(tensor), -1) if tensor.dim() else tensor.detach().reshape(1, 1)
    directions = torch.arange(rows.shape[1], device=rows.device, dtype=torch.float32).mul_(0.618).cos_()
    marks = (rows.to(torch.float32) @ directions).cos()
    places = torch.arange(len(rows), device=rows.device, dtype=torch.float32).mul_(0.618).sin_()
    anyhow, ordered = torch.stack([marks, marks * places]).sum(1, dtype=widest(rows.device)).tolist()
    return anyhow, anyhow + ordered
