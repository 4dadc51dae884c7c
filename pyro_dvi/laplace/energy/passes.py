# SPDX-License-Identifier: Apache-2.0
"""Go through the same data again and again, and notice when they are not the same, or not each row once."""

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from pyro_dvi.core.batches import arguments, check_loader, tensors_in
from pyro_dvi.core.undisturbed import widest
from pyro_dvi.errors import DataError, ModelError, warn
from pyro_dvi.runs.explained import bad_values
from pyro_dvi.runs.log_joint import JointRun

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Passes:
    """Repeated passes over fixed batches.

    A checksum of every pass, which does not depend on the order of the rows, is compared with that of the first:
    solvers would average over data that are augmented at random or drawn with replacement, without any sign of it.

    Args:
        batches: a loader or a list of batches, each a tuple of the model's arguments or a mapping of them.
        device: where to bring the tensors.

    Raises:
        DataError: a list holds the same tensors twice.

    Attributes:
        order: for every batch of the first pass a checksum of its rows in their order.
        reordered: a pass had the rows in another order than the first.
    """

    def __init__(self, batches: Iterable[Any], device: torch.device | None) -> None:
        check_loader(batches, passes=2, role="batches")
        if isinstance(batches, (list, tuple)):
            calls = [arguments(batch, None) for batch in batches]
            if len({tuple(map(id, (*args, *kwargs.values()))) for args, kwargs in calls}) < len(calls):
                raise DataError("batches holds the same tensors twice: give all the data once")
        self.batches = batches
        self.device = device
        self._first: tuple[int, float] | None = None
        self._tied = 0.0
        self.order: list[float] = []
        self._known = WeakIdKeyDictionary()
        self.reordered = False

    @property
    def checksum(self) -> float:
        """Checksum of the rows with their labels, in any order; goes through the data if no pass was made yet."""
        if self._first is None:
            deque(self, maxlen=0)
        assert self._first is not None
        return self._first[1] + self._tied

    @property
    def num_batches(self) -> int:
        """Number of batches in the first whole pass."""
        assert self._first is not None
        return self._first[0]

    def __iter__(self) -> Iterator[Arguments]:
        """Yield the arguments of every batch.

        Raises:
            DataError: the loader yields nothing, NaN or infinities, or other data than the first time.
        """
        count, total, tied = 0, 0.0, 0.0
        for batch in self.batches:
            found = arguments(batch, self.device)
            sums = list(map(self._checksums, tensors_in(batch), tensors_in(found)))
            total += sum(anyhow for anyhow, _ in sums)
            bad = None if math.isfinite(total) else bad_values(*found)
            if bad is not None:
                raise bad
            self._compare_order(count, sum(ordered for _, ordered in sums))
            tied += _tied(tensors_in(found)) if self._first is None else 0.0
            count += 1
            yield found
        if count == 0:
            raise DataError("batches is empty: it has no batches")
        if self._first is None:
            self._first = count, total
            self._tied = tied
        elif not same_data(self._first[1], total):
            raise DataError(
                "the batches changed between two passes over the data (random augmentation, sampling with replacement, "
                "or drop_last of a shuffled loader): list(loader) fixes one pass"
            )

    def first_again(self) -> Arguments:
        """Return the first batch of another pass, which is gone through where its rows have changed or moved.

        Raises:
            DataError: as a pass.
        """
        first = next(iter(self))
        if self.reordered:
            deque(self, maxlen=0)
        return first

    def _checksums(self, given: Tensor, placed: Tensor) -> tuple[float, float]:
        """Return the checksums of a tensor; tensors that come again, as from a list of batches, are read once."""
        version = None if given.is_inference() else given._version  # counts changes in place
        known, sums = self._known.get(given, (None, (0.0, 0.0)))
        if given is placed and known is not None and version != known:
            raise DataError(
                "the batches changed between two passes over the data, or within one, as by a loader that fills the "
                "same tensors again: give copies, [(x.clone(), y.clone()) for x, y in loader]"
            )
        if known is None or known != version:
            sums = _checksums(placed)
            self._known[given] = version, sums
        return sums

    def _compare_order(self, index: int, ordered: float) -> None:
        if index == len(self.order) and self._first is None:
            self.order.append(ordered)
        elif index >= len(self.order) or abs(ordered - self.order[index]) > 1e-6 * max(1.0, abs(ordered)):
            self.reordered = True


def same_data(first: float | None, other: float | None) -> bool:
    """Tell if two checksums belong to the same rows; False where one is unknown."""
    return first is not None and other is not None and abs(other - first) <= 1e-6 * max(1.0, abs(first))


def _checksums(tensor: Tensor) -> tuple[float, float]:
    """A nonlinear sum over rows, so that rows may change places but not mix; and one in which they may not."""
    if tensor.numel() == 0 or tensor.is_complex():
        return float(tensor.numel()), 0.0
    marks = _marks(tensor)
    places = torch.arange(len(marks), device=marks.device, dtype=marks.dtype).mul_(0.618).sin_()
    anyhow, ordered = torch.stack([marks, marks * places]).sum(1).tolist()
    return anyhow, anyhow + ordered


def _tied(tensors: Iterable[Tensor]) -> float:
    """A sum over rows of products over the tensors of a batch, which labels of other rows would change."""
    marks = [_marks(t) for t in tensors if t.numel() and t.dim() and not t.is_complex()]
    together = [m for m in marks if len(m) == len(marks[0])]
    return float(torch.stack(together).prod(0).sum()) if together else 0.0


def _marks(tensor: Tensor) -> Tensor:
    """A number for each row."""
    rows = tensor.detach().reshape(len(tensor), -1) if tensor.dim() else tensor.detach().reshape(1, 1)
    # Sums over the pixels of an image are rounded in another way in a batch of another size.
    exact = widest(rows.device)
    directions = torch.arange(rows.shape[1], device=rows.device, dtype=exact).mul_(0.618).cos_()
    return (rows.to(exact) @ directions + 1.0).cos()  # not even: a row and its negative differ


class Rows:
    """Count the rows of plates over a pass, and compare what its batches say of the prior and of scales."""

    def __init__(self) -> None:
        self.batches = 0
        self._log_priors: Tensor | None = None
        self._log_likelihoods: list[Tensor] = []
        # For each batch: the rows of a plate and its size; the observations of a site and their scale.
        self._plates: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        self._scales: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)

    def add(self, run: JointRun) -> None:
        """Take a batch in.

        Raises:
            ModelError: its prior is not that of the first one.
        """
        self.batches += 1
        self._compare_priors(run)
        self._log_likelihoods.append(run.log_likelihood().detach())
        for site in run.sites:
            if not torch.is_tensor(site.scale) or site.scale.numel() == 1:  # else weights of single examples
                size = torch.Size(site.fn.batch_shape).numel()
                self._scales[site.name].append((size, float(site.scale)))
        for name, counts in run.rows.items():
            self._plates[name].append(counts)

    def check(self, order: list[float]) -> None:
        """Compare what was seen with the size of each plate.

        A scale that blows each of several batches up to all the data is that of stochastic training, and would count
        the data once for each batch. It cannot be told from a weight that happens to be the number of batches: a
        warning says so.

        Args:
            order: the order of the :class:`Passes`.

        Raises:
            DataError: rows are missing, or there are too many.
        """
        filled = all(size == full > 1 for counts in self._plates.values() for size, full in counts)
        # The same tensors may come with other indices of rows, and rows without inputs be equal.
        same = all(map(torch.equal, self._log_likelihoods[1:], self._log_likelihoods[:1] * self.batches))
        if self._plates and filled and same and len(order) > 1 == len(set(order)):
            raise DataError("two batches hold the same data, which would count twice: give every row once")
        for name, counts in sorted(self._plates.items()):
            rows, sizes = sum(size for size, _ in counts), {full for _, full in counts}
            if sizes != {rows} and any(size != full for size, full in counts):
                raise DataError(
                    f"the batches hold {rows} rows of plate {name!r}, whose size is {max(sizes)}: give all the data "
                    "once, by a loader with drop_last=False, and a plate of their size"
                )
        for name, seen in self._scales.items():
            rows = sum(size for size, _ in seen)
            if len(seen) > 1 and all(abs(size * scale - rows) <= 1e-5 * rows for size, scale in seen):
                warn(
                    f"observed site {name!r} has scale {seen[0][1]:.6g} in a batch of {seen[0][0]} of {rows} "
                    f"observations, so that all data count {len(seen)} times. If it makes up for the size of a batch, "
                    "write pyro.plate('data', size=num_data, subsample_size=len(x)) in place of poutine.scale"
                )

    def _compare_priors(self, run: JointRun) -> None:
        found = torch.stack([term.detach() for term in run.log_priors.values()])
        if self._log_priors is None:
            self._log_priors = found
            return
        rounding = 1e3 * torch.finfo(found.dtype).eps
        same = torch.isclose(found, self._log_priors, rtol=rounding, atol=rounding, equal_nan=True)
        if not bool(same.all()):
            name = next(name for name, equal in zip(run.log_priors, same, strict=True) if not equal)
            raise ModelError(
                f"the prior of {name!r} changes from batch to batch: compute what it takes from all the data, once and "
                "outside of the model; leave the scale of a batch to pyro.plate('data', size=num_data, "
                "subsample_size=len(x))"
            )
