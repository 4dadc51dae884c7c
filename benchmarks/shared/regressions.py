# SPDX-License-Identifier: Apache-2.0
"""UCI regression sets, their folds, and training sets for many networks that train as one batch."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.shared.benchmark import device

SETS = ("boston", "concrete", "energy", "kin8nm", "power-plant", "wine-quality-red", "yacht")
Rows = np.ndarray


def load(name: str, data_dir: str | None) -> tuple[Tensor, Tensor]:
    """Return inputs ``[n, d]`` and targets ``[n]`` in float64, from ``<data_dir>/uci/<name>.npz`` (keys X and y).

    Args:
        name: one of :data:`SETS`.
        data_dir: the folder; the variable PYRO_DVI_DATA by default.
    """
    with np.load(_path(name, data_dir)) as file:
        x, y = (torch.from_numpy(file[key]).double().to(device()) for key in ("X", "y"))
    return x, y.reshape(-1)


def _path(name: str, data_dir: str | None) -> Path:
    folder = data_dir or os.environ.get("PYRO_DVI_DATA")
    if not folder:
        raise SystemExit("say where the data are: --data-dir DIR or PYRO_DVI_DATA, with DIR/uci/<name>.npz")
    return Path(folder) / "uci" / f"{name}.npz"


def folds(num_rows: int, count: int = 10, seed: int = 1) -> list[tuple[Rows, Rows]]:
    """Training and test rows of a shuffled cross-validation; test parts differ in size by one row at most."""
    order = np.arange(num_rows)
    np.random.RandomState(seed).shuffle(order)
    tests = [np.sort(part) for part in np.array_split(order, count)]
    return [(np.setdiff1d(order, test), test) for test in tests]


def standard_split(name: str, number: int, data_dir: str | None) -> tuple[Rows, Rows]:
    """Training and test rows of one of the 20 splits that come with the files, 90 to 10 %."""
    with np.load(_path(name, data_dir)) as file:
        return file["train_idx"][number].astype(np.int64), file["test_idx"][number].astype(np.int64)


def hold_out(train: Rows, parts: int, which: int, seed: int = 7) -> tuple[Rows, Rows]:
    """Split training rows into ``parts``, and hold one of them out for validation."""
    split = np.array_split(np.random.RandomState(seed).permutation(train), parts)
    return np.concatenate([part for k, part in enumerate(split) if k != which]), split[which]


@dataclass(frozen=True)
class Minibatch:
    """One minibatch for each of K networks: ``x`` ``[m, K, d]``, ``y`` and ``mask`` ``[m, K]``."""

    x: Tensor
    y: Tensor
    mask: Tensor | None


class TrainingSets:
    """Rows of one data set for each of K networks, standardised by their own means and deviations.

    Args:
        x: all inputs.
        y: all targets.
        rows: training rows of each network.
        standardise_targets: whether targets are standardised too.
    """

    def __init__(self, x: Tensor, y: Tensor, rows: list[Rows], standardise_targets: bool = True) -> None:
        self._x, self._y = x, y
        index = [torch.from_numpy(part) for part in rows]
        self.sizes = torch.tensor([len(part) for part in index])
        self.x_mean, self.x_scale = standards([x[part] for part in index])
        if standardise_targets:
            self.y_mean, self.y_scale = standards([y[part] for part in index])
        else:
            self.y_mean, self.y_scale = torch.zeros(len(rows)).double(), torch.ones(len(rows)).double()
        self.x, self.y, self._valid = self._standardised(rows)

    def examples(self, rows: list[Rows]) -> tuple[Minibatch, Tensor]:
        """Return other rows for each network as one minibatch, and where it is no padding ``[m, K]``."""
        x, y, valid = self._standardised(rows)
        return Minibatch(x.transpose(0, 1), y.t(), None), valid.t()

    def _standardised(self, rows: list[Rows]) -> tuple[Tensor, Tensor, Tensor]:
        index, valid = _padded(rows)
        x = (self._x[index] - self.x_mean.unsqueeze(1)) / self.x_scale.unsqueeze(1)
        y = (self._y[index] - self.y_mean.unsqueeze(1)) / self.y_scale.unsqueeze(1)
        return x.float(), y.float(), valid

    def minibatches(self, size: int, seed: int, keep_rest: bool = False) -> Iterator[Minibatch]:
        """Give shuffled minibatches for ever, each network's from its own rows.

        Args:
            size: rows in each.
            seed: of the shuffles.
            keep_rest: end an epoch on a smaller minibatch, under a mask, instead of leaving rows out.
        """
        generator = torch.Generator().manual_seed(seed)
        nets = torch.arange(len(self.sizes)).unsqueeze(1)
        last = int(self.sizes.max()) if keep_rest else int(self.sizes.min()) // size * size
        while True:
            order = (
                torch.rand(self._valid.shape, generator=generator).masked_fill_(~self._valid, 2.0).argsort(1)
            )
            for start in range(0, last, size):
                rows = order[:, start : min(start + size, last)]
                mask = self._valid.gather(1, rows).t() if keep_rest else None
                yield Minibatch(self.x[nets, rows].transpose(0, 1), self.y[nets, rows].t(), mask)

    def steps_per_epoch(self, size: int) -> int:
        """Minibatches of one epoch that keeps the rest."""
        return -(-int(self.sizes.max()) // size)


def standards(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return means and deviations ``[K, d]`` of K parts ``[n, d]``; 1 for columns that are constant up to rounding."""
    means = torch.stack([part.mean(0) for part in parts])
    scales = torch.stack([part.std(0, unbiased=False) for part in parts])
    # Roundings of a constant would become noise of deviation 1.
    rounding = 32 * torch.finfo(scales.dtype).eps * torch.stack([part.abs().amax(0) for part in parts])
    return means, torch.where(scales > rounding, scales, torch.ones_like(scales))


def _padded(rows: list[Rows]) -> tuple[Tensor, Tensor]:
    longest = max(map(len, rows))
    index = torch.from_numpy(np.stack([np.resize(part, longest) for part in rows]))
    return index, torch.arange(longest) < torch.tensor([len(part) for part in rows]).unsqueeze(1)
