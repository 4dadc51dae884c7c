# SPDX-License-Identifier: Apache-2.0
"""Repeated passes over fixed data, with checks that the data do not change and that every row occurs once."""

import math
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.core.batches import arguments, check_loader, tensors_in
from pyro_dvi.core.undisturbed import widest
from pyro_dvi.errors import DataError, ModelError, warn
from pyro_dvi.runs.explained import bad_values
from pyro_dvi.runs.log_joint import JointRun

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Passes:
    """Repeated passes over fixed batches.

    The checksum of every pass, which does not depend on the order of the rows, is compared with that of the first pass.
    Without this check, solvers would silently average over random augmentation or sampling with replacement.

    Args:
        batches: a loader or a list of batches, each a tuple or a mapping of the model's arguments.
        device: device of the tensors that are yielded.

    Raises:
        DataError: a list contains the same tensors twice.

    Attributes:
        reordered: whether the order of rows differed between passes.
    """

    def __init__(self, batches: Iterable[Any], device: torch.device | None) -> None:
        check_loader(batches, passes=2, role="batches")
        if isinstance(batches, (list, tuple)):
            calls = [arguments(batch, None) for batch in batches]
            if len({tuple(map(id, (*args, *kwargs.values()))) for args, kwargs in calls}) < len(calls):
                raise DataError("batches contains the same tensors twice: pass every example once")
        self.batches = batches
        self.device = device
        self.reordered = False
        self._checksum: float | None = None
        self.order: list[float] = []
        self._known: dict[int, tuple[list[Any], list[int | None], tuple[float, float]]] = {}

    @property
    def checksum(self) -> float:
        """Checksum of the rows with their labels, independent of their order; the first call may read all data."""
        if self._checksum is None:
            deque(self, maxlen=0)
        assert self._checksum is not None
        return self._checksum

    @property
    def num_batches(self) -> int:
        """Number of batches in the first complete pass."""
        return len(self.order)

    def __iter__(self) -> Iterator[Arguments]:
        """Yield the arguments of every batch.

        Raises:
            DataError: the loader yields no batches, NaN or infinite values, or other data than in the first pass.
        """
        count, total = 0, 0.0
        for batch in self.batches:
            found = arguments(batch, self.device)
            anyhow, ordered = self._checksums(count, tensors_in(batch), tensors_in(found))
            total += anyhow
            bad = None if math.isfinite(total) else bad_values(*found)
            if bad is not None:
                raise bad
            if count == len(self.order) and self._checksum is None:
                self.order.append(ordered)
            elif count >= len(self.order) or not same_data(ordered, self.order[count]):
                self.reordered = True
            count += 1
            yield found
        if count == 0:
            raise DataError("batches is empty: pass all the data")
        if self._checksum is None:
            self._checksum = total
        elif not same_data(self._checksum, total):
            raise DataError(
                "the batches changed between two passes over the data (through random augmentation, sampling with "
                "replacement, or drop_last of a shuffled loader): pass list(loader) to fix one pass"
            )

    def first_again(self) -> Arguments:
        """Return the first batch of another pass; if its rows have changed or moved, the pass is completed as a check.

        Raises:
            DataError: see :meth:`__iter__`.
        """
        first = next(iter(self))
        if self.reordered:
            deque(self, maxlen=0)
        return first

    def _checksums(self, index: int, given: list[Tensor], placed: list[Tensor]) -> tuple[float, float]:
        """Return the checksums of a batch; tensors that recur, as with a list of batches, are read once."""
        versions = [None if t.is_inference() else t._version for t in given]  # counts of in-place changes
        references, before, sums = self._known.get(index, ([], [], (0.0, 0.0)))
        names = list(map(id, given))
        if names and names == [id(r()) for r in references]:
            if versions == before and None not in versions:
                return sums
            if versions != before and names == list(map(id, placed)):
                raise DataError(
                    "the batches changed between two passes over the data, or within a pass, as with a loader that "
                    "reuses its tensors: pass copies, [(x.clone(), y.clone()) for x, y in loader]"
                )
        sums = _checksums(placed)
        self._known[index] = [weakref.ref(t) for t in given], versions, sums
        return sums


def same_data(first: float | None, other: float | None) -> bool:
    """Return whether two checksums belong to the same rows; False if one is unknown."""
    return first is not None and other is not None and abs(other - first) <= 1e-6 * max(1.0, abs(first))


def _checksums(tensors: Iterable[Tensor]) -> tuple[float, float]:
    """Return two nonlinear sums over rows; only the second depends on the order of the rows.

    Tensors of the same length are parts of the same rows, so permuted labels change both sums.
    """
    angles: dict[Any, Tensor] = {}
    for k, tensor in enumerate(tensors):
        if tensor.numel() and not tensor.is_complex():
            rows = tensor.detach().reshape(len(tensor) if tensor.dim() else 1, -1)
            # The rounding of sums over the pixels of an image depends on the batch size.
            columns = torch.arange(rows.shape[1], device=rows.device, dtype=widest(rows.device))
            angle = rows.to(columns) @ columns.mul_(0.618).add_(k).cos_()
            place = rows.device, len(rows)
            angles[place] = (
                angles.get(place, torch.ones(())) + angle
            )  # the 1 distinguishes a row from its negative
    anyhow = ordered = 0.0
    for angle in angles.values():
        marks = angle.cos()
        places = torch.arange(len(marks), device=marks.device, dtype=marks.dtype).mul_(0.618).sin_()
        anyhow, ordered = anyhow + float(marks.sum()), ordered + float((marks * (1 + places)).sum())
    return anyhow, ordered


class Rows:
    """Count the rows of plates in a pass, and compare the priors and scales of its batches."""

    def __init__(self) -> None:
        self._log_priors: Tensor | None = None
        self._log_likelihoods: list[Tensor] = []
        # For each batch, the rows and size of each plate, and the number of observations and scale of each site.
        self._plates: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        self._scales: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)

    def add(self, run: JointRun) -> None:
        """Add a batch.

        Raises:
            ModelError: the prior differs from the prior in the first batch.
        """
        found = torch.stack([term.detach() for term in run.log_priors.values()])
        self._log_priors = found if self._log_priors is None else self._log_priors
        rounding = 1e3 * torch.finfo(found.dtype).eps
        same = torch.isclose(found, self._log_priors, rtol=rounding, atol=rounding, equal_nan=True)
        if not bool(same.all()):
            name = list(run.log_priors)[int(same.int().argmin())]
            raise ModelError(
                f"the prior of {name!r} changes from batch to batch: compute statistics of the data outside the model; "
                "to scale a minibatch, use pyro.plate('data', size=num_data, subsample_size=len(x))"
            )
        self._log_likelihoods.append(run.log_likelihood().detach())
        for site in run.sites:
            # Other scales are weights of single examples.
            if not torch.is_tensor(site.scale) or site.scale.numel() == 1:
                size = torch.Size(site.fn.batch_shape).numel()
                self._scales[site.name].append((size, float(site.scale)))
        for name, counts in run.rows.items():
            self._plates[name].append(counts)

    def check(self, order: list[float]) -> None:
        """Compare the rows with the size of each plate.

        If a scale makes each of several batches count as much as all the data, it belongs to stochastic training; here,
        all the data would be counted once per batch. This causes only a warning, because a constant weight may equal
        the number of batches by chance.

        Args:
            order: checksum of the rows of each batch.

        Raises:
            DataError: there are too few or too many rows.
        """
        filled = all(size == full > 1 for counts in self._plates.values() for size, full in counts)
        # Equal likelihoods alone do not show a repetition: batches may differ in their row indices, or have no inputs.
        same = all(map(torch.equal, self._log_likelihoods[1:], self._log_likelihoods))
        if self._plates and filled and same and len(order) > 1 == len(set(order)):
            raise DataError("two batches contain the same data, which would count twice: pass every row once")
        for name, counts in sorted(self._plates.items()):
            rows, sizes = sum(size for size, _ in counts), {full for _, full in counts}
            if sizes != {rows} and any(size != full for size, full in counts):
                raise DataError(
                    f"the batches contain {rows} rows of plate {name!r}, whose size is {max(sizes)}: pass all the data "
                    "once, with drop_last=False, and set the size of the plate to the number of examples"
                )
        for name, seen in self._scales.items():
            rows = sum(size for size, _ in seen)
            if len(seen) > 1 and all(abs(size * scale - rows) <= 1e-5 * rows for size, scale in seen):
                warn(
                    f"observed site {name!r} has scale {seen[0][1]:.6g} in a batch of {seen[0][0]} of {rows} "
                    f"observations, so all data count {len(seen)} times: to compensate for the batch size, use "
                    "pyro.plate('data', size=num_data, subsample_size=len(x))"
                )
