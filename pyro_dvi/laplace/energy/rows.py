# SPDX-License-Identifier: Apache-2.0
"""Whether the batches of a pass hold every row of the data once, under one prior."""

import warnings

import torch
from torch import Tensor

from pyro_dvi.errors import DataError, DviWarning, ModelError
from pyro_dvi.handlers.log_joint import JointRun

__all__ = ["Rows"]


class Rows:
    """Count the rows of plates over a pass, and compare what its batches say of the prior and of scales."""

    def __init__(self) -> None:
        self.batches = 0
        self._seen: dict[str, int] = {}
        self._full: dict[str, set[int]] = {}
        self._subsampled: set[str] = set()
        self._log_priors: Tensor | None = None
        self._scales: dict[str, list[tuple[int, float]]] = {}

    def add(self, run: JointRun) -> None:
        """Take a batch in.

        Raises:
            ModelError: its prior is not that of the first one.
        """
        self.batches += 1
        self._compare_priors(run)
        for site in run.sites:
            if not torch.is_tensor(site.scale) or site.scale.numel() == 1:  # else weights of single examples
                size = torch.Size(site.fn.batch_shape).numel()
                self._scales.setdefault(site.name, []).append((size, float(site.scale)))
        for name, (size, full) in run.rows.items():
            self._seen[name] = self._seen.get(name, 0) + size
            self._full.setdefault(name, set()).add(full)
            if size != full:
                self._subsampled.add(name)

    def check(self) -> None:
        """Compare what was seen with the size of each subsampled plate.

        A scale that blows each of several batches up to all the data is that of stochastic training, and would count
        the data once for each batch. It cannot be told from a weight that happens to be the number of batches: a
        warning says so.

        Raises:
            DataError: rows are missing, or there are too many.
        """
        for name in sorted(self._subsampled):
            sizes = self._full[name]
            if sizes != {self._seen[name]}:
                raise DataError(
                    f"the batches hold {self._seen[name]} rows of plate {name!r}, whose size is {max(sizes)}. The "
                    "posterior needs all the data once: a loader with drop_last=False over the whole data set, and a "
                    "plate of its size"
                )
        for name, seen in self._scales.items():
            rows = sum(size for size, _ in seen)
            if len(seen) > 1 and all(abs(size * scale - rows) <= 1e-5 * rows for size, scale in seen):
                warnings.warn(
                    f"observed site {name!r} has scale {seen[0][1]:.6g} in a batch of {seen[0][0]} of {rows} "
                    f"observations: over a pass of {len(seen)} batches, all data count {len(seen)} times. If it is to "
                    "make up for the size of a batch, write pyro.plate('data', size=num_data, subsample_size=len(x)) "
                    "in place of poutine.scale: such a plate is known, and each row counted once",
                    DviWarning,
                    stacklevel=2,
                )

    def _compare_priors(self, run: JointRun) -> None:
        found = torch.stack([term.detach() for term in run.log_priors.values()])
        if self._log_priors is None:
            self._log_priors = found
            return
        rounding = 1e3 * torch.finfo(found.dtype).eps
        same = torch.isclose(found, self._log_priors, rtol=rounding, atol=rounding, equal_nan=True)
        if not bool(same.all()):
            name, k = next((name, k) for k, name in enumerate(run.log_priors) if not same[k])
            raise ModelError(
                f"the prior of {name!r} changes from batch to batch (log density {self._log_priors[k].item():.6g} in "
                f"the first, {found[k].item():.6g} in another): it would count as that of the first. Compute what it "
                "takes from data of all the data, once and outside of the model; leave the scale of a batch to "
                "pyro.plate('data', size=num_data, subsample_size=len(x))"
            )
