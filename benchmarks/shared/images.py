# SPDX-License-Identifier: Apache-2.0
"""Fashion-MNIST, MNIST and CIFAR-10 as tensors, from a folder or downloaded by torchvision; scikit-learn's digits."""

import gzip
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.shared.benchmark import device

MEAN_STD: dict[str, tuple] = {
    "FashionMNIST": (0.2860, 0.3530),
    "MNIST": (0.1307, 0.3081),
    "CIFAR10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}
SMALL = {"FashionMNIST": "fashion_mnist", "MNIST": "mnist"}


@dataclass
class ImageSplit:
    """Disjoint training and validation images drawn by a seed, and the standard test images."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def load_split(
    name: str, num_train: int, num_validation: int, num_test: int, seed: int, data_dir: str | None
) -> ImageSplit:
    """Return standardised images ``[n, channels, height, width]`` and labels.

    Args:
        name: "FashionMNIST", "MNIST" or "CIFAR10".
        num_train: training images, drawn from all there are by ``seed``.
        num_validation: validation images, drawn likewise from the rest.
        num_test: first images of the test set.
        seed: seed of the draw.
        data_dir: folder with ``<name>/raw/*-ubyte.gz``, or with a subset ``small/<name>_small.npz``; for CIFAR-10 with
            ``CIFAR10/{data_batch_1,data_batch_2,test_batch}.webp`` (100 x 100 tiles of 32 x 32) and ``labels.npz``;
            the variable PYRO_DVI_DATA or a download by default.
    """
    x, y = _load(name, True, data_dir)
    x_test, y_test = _load(name, False, data_dir)
    if num_train + num_validation > len(x):
        raise ValueError(f"{num_train} + {num_validation} images wanted, {len(x)} are there")
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(x)))
    train, validation = order[:num_train], order[num_train : num_train + num_validation]
    return ImageSplit(
        (x[train], y[train]), (x[validation], y[validation]), (x_test[:num_test], y_test[:num_test])
    )


def outside_images(name: str, of: str, count: int, data_dir: str | None) -> Tensor:
    """Return images of another kind, standardised as those of data set ``of``.

    Args:
        name: "noise" (uniform pixels), "notMNIST" (letters, from ``small/notmnist_small.npz``), or a data set whose
            first test images are taken; all but noise for 28 x 28 grey images.
        of: the data set whose images they stand beside.
        count: how many at most.
        data_dir: as for :func:`load_split`.
    """
    mean, std = _mean_and_std(of)
    if name == "noise":
        size = (3, 32, 32) if of == "CIFAR10" else (1, 28, 28)
        pixels = torch.rand(count, *size, generator=torch.Generator().manual_seed(0))
    elif name == "notMNIST":
        folder = data_dir or os.environ.get("PYRO_DVI_DATA") or ""
        letters = np.load(Path(folder) / "small" / "notmnist_small.npz")["x_test"][:count]
        pixels = torch.from_numpy(letters.astype(np.float32) / 255).reshape(-1, 1, 28, 28)
    else:
        own_mean, own_std = _mean_and_std(name)
        pixels = _load(name, False, data_dir)[0][:count].cpu() * own_std + own_mean
    return ((pixels - mean) / std).to(device())


def _mean_and_std(name: str) -> tuple[Tensor, Tensor]:
    mean, std = (torch.tensor(value).reshape(-1, 1, 1) for value in MEAN_STD[name])
    return mean, std


def digits_split(num_train: int, num_validation: int, seed: int) -> ImageSplit:
    """Return the digits of scikit-learn ``[n, 1, 8, 8]``; every second one is for testing with all seeds."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.from_numpy((digits.images.astype(np.float32) - 4.88) / 6.02).unsqueeze(1).to(device())
    y = torch.from_numpy(digits.target.astype(np.int64)).to(device())
    is_test = torch.arange(len(x)) % 2 == 0
    rest = np.random.default_rng(seed).permutation(np.flatnonzero(~is_test.numpy()))
    if num_train + num_validation > len(rest):
        raise ValueError(f"{num_train} + {num_validation} images wanted, {len(rest)} are there")
    order = torch.from_numpy(rest)
    train, validation = order[:num_train], order[num_train : num_train + num_validation]
    return ImageSplit((x[train], y[train]), (x[validation], y[validation]), (x[is_test], y[is_test]))


def _load(name: str, train: bool, data_dir: str | None) -> tuple[Tensor, Tensor]:
    folder = data_dir or os.environ.get("PYRO_DVI_DATA")
    stem = "train" if train else "t10k"
    small = Path(folder or "") / "small" / f"{SMALL.get(name)}_small.npz"
    raw = Path(folder or "") / name / "raw"
    if folder and name == "CIFAR10":
        images, labels = _tiles(Path(folder) / name, train)
    elif folder and small.exists() and not raw.exists():
        arrays = np.load(small)
        part = "train" if train else "test"
        images, labels = arrays[f"x_{part}"], arrays[f"y_{part}"]
    elif folder:
        images = _idx(raw / f"{stem}-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28)
        labels = _idx(raw / f"{stem}-labels-idx1-ubyte.gz", 8)
    else:
        import torchvision

        dataset = getattr(torchvision.datasets, name)("data", train=train, download=True)
        images, labels = np.asarray(dataset.data), np.asarray(dataset.targets)
    mean, std = _mean_and_std(name)
    pixels = torch.from_numpy(images.astype(np.float32) / 255)
    pixels = pixels.unsqueeze(1) if pixels.dim() == 3 else pixels.movedim(-1, 1)
    return ((pixels - mean) / std).to(device()), torch.from_numpy(labels.astype(np.int64)).to(device())


def _tiles(folder: Path, train: bool) -> tuple[np.ndarray, np.ndarray]:
    from PIL import Image

    grids = [
        np.asarray(Image.open(folder / f"{stem}.webp").convert("RGB"))
        for stem in (("data_batch_1", "data_batch_2") if train else ("test_batch",))
    ]
    tiles = [
        grid.reshape(100, 32, 100, 32, 3).transpose(0, 2, 1, 3, 4).reshape(-1, 32, 32, 3) for grid in grids
    ]
    images = np.concatenate(tiles)
    labels = np.load(folder / "labels.npz")["train_labels" if train else "test_labels"]
    return images, labels[: len(images)]


def _idx(path: Path, header: int) -> np.ndarray:
    if not path.exists():
        raise FileNotFoundError(
            f"{path} not found: point --data-dir at a folder that holds <name>/raw/*-ubyte.gz"
        )
    with gzip.open(path) as file:
        return np.frombuffer(file.read()[header:], np.uint8)
