# SPDX-License-Identifier: Apache-2.0
"""Repeated passes over fixed data, with checks that the data do not change and that every row occurs once."""

import math
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

    The sums of all numbers in two passes are compared. Without this check, solvers would silently average over random
    augmentation or sampling with replacement.

    Args:
        batches: a loader or a list of batches, each a tuple or a mapping of the model's arguments.
        device: device of the tensors that are yielded.

    Attributes:
        reordered: whether the batches differed between passes, as those of a shuffled loader do.
        sums: a weighted sum of the numbers in each batch of the first complete pass.
        bad: an error that names NaN and infinite values in the last batch; None if there are none.
    """

    def __init__(self, batches: Iterable[Any], device: torch.device | None) -> None:
        check_loader(batches, passes=2, role="batches")
        self.batches, self.device = batches, device
        self.reordered = False
        self.sums: list[float] = []
        self.bad: DataError | None = None

    def __iter__(self) -> Iterator[Arguments]:
        """Yield the arguments of every batch.

        Raises:
            DataError: the loader yields no batches, or other data than in the first pass.
        """
        sums: list[float] = []
        for place, batch in enumerate(self.batches):
            found = arguments(batch, self.device)
            total = _weighted_sum(found)
            self.bad = None if math.isfinite(total) else bad_values(*found)
            sums.append(total if self.bad is None else _weighted_sum(found, torch.nansum))
            if self.sums and sums[-1:] != self.sums[place : place + 1]:
                self.reordered = True
            yield found
        if not sums:
            raise DataError("batches is empty: pass all the data")
        self.sums = self.sums or sums
        if abs(sum(sums) - sum(self.sums)) > 1e-6 * (1 + sum(map(abs, self.sums))):
            raise DataError(
                "the batches changed between two passes over the data (through random augmentation, sampling with "
                "replacement, or drop_last of a shuffled loader): pass list(loader) to fix one pass"
            )

    def first(self) -> Arguments:
        """Return the first batch of another pass; if batches have changed or moved, a whole pass is compared.

        Raises:
            DataError: see :meth:`__iter__`.
        """
        first = next(iter(self))
        if self.reordered:
            deque(self, maxlen=0)
        return first


def _weighted_sum(batch: Arguments, add: Any = torch.sum) -> float:
    """Return a sum over the numbers of a batch, whose weights depend on the position in a row, but not on the row."""
    total = 0.0
    for tensor in tensors_in(batch):
        if tensor.numel() and not tensor.is_complex():
            wide = widest(tensor.device)
            rows = tensor.detach().reshape(len(tensor) if tensor.dim() else 1, -1)
            columns = add(rows, 0, dtype=wide)
            weights = torch.arange(len(columns), device=columns.device, dtype=wide).cos_()
            total += float(columns @ weights)
    return total


class Rows:
    """Count the rows of plates in a pass, and compare the priors and scales of its batches."""

    def __init__(self) -> None:
        self._log_priors: Tensor | None = None
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
        for site in run.sites:
            # Other scales are weights of single examples.
            if not torch.is_tensor(site.scale) or site.scale.numel() == 1:
                size = torch.Size(site.fn.batch_shape).numel()
                self._scales[site.name].append((size, float(site.scale)))
        for name, counts in run.rows.items():
            self._plates[name].append(counts)

    def check(self) -> None:
        """Compare the rows with the size of each plate.

        If a scale makes each of several batches count as much as all the data, it belongs to stochastic training; here,
        all the data would be counted once per batch. This causes only a warning, because a constant weight may equal
        the number of batches by chance.

        Raises:
            DataError: there are too few or too many rows.
        """
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
                    f"observations, so all data count {len(seen)} times: use pyro.plate(name, size, subsample_size)"
                )
