# SPDX-License-Identifier: Apache-2.0
"""Fashion-MNIST and MNIST as tensors, from a folder or downloaded by torchvision; scikit-learn's digits."""

import gzip
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

MEAN_STD = {"FashionMNIST": (0.2860, 0.3530), "MNIST": (0.1307, 0.3081)}


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
    """Return standardised images ``[n, 1, 28, 28]`` and labels.

    Args:
        name: "FashionMNIST" or "MNIST".
        num_train: training images, drawn from the 60,000 by ``seed``.
        num_validation: validation images, drawn likewise from the rest.
        num_test: first images of the test set.
        seed: seed of the draw.
        data_dir: folder with ``<name>/raw/*-ubyte.gz``, or with a subset ``small/<name>_small.npz``; the variable
            PYRO_DVI_DATA or a download by default.
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


def digits_split(num_train: int, num_validation: int, seed: int) -> ImageSplit:
    """Return the digits of scikit-learn ``[n, 1, 8, 8]``; every second one is for testing with all seeds."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.from_numpy((digits.images.astype(np.float32) - 4.88) / 6.02).unsqueeze(1)
    y = torch.from_numpy(digits.target.astype(np.int64))
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
    small = Path(folder or "") / "small" / f"{SMALL[name]}_small.npz"
    raw = Path(folder or "") / name / "raw"
    if folder and small.exists() and not raw.exists():
        arrays = np.load(small)
        part = "train" if train else "test"
        images, labels = arrays[f"x_{part}"], arrays[f"y_{part}"]
    elif folder:
        images = _idx(raw / f"{stem}-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28)
        labels = _idx(raw / f"{stem}-labels-idx1-ubyte.gz", 8)
    else:
        import torchvision

        dataset = getattr(torchvision.datasets, name)("data", train=train, download=True)
        images, labels = dataset.data.numpy(), dataset.targets.numpy()
    mean, std = MEAN_STD[name]
    x = (torch.from_numpy(images.astype(np.float32) / 255).unsqueeze(1) - mean) / std
    return x, torch.from_numpy(labels.astype(np.int64))


def _idx(path: Path, header: int) -> np.ndarray:
    if not path.exists():
        raise FileNotFoundError(
            f"{path} not found: point --data-dir at a folder that holds <name>/raw/*-ubyte.gz"
        )
    with gzip.open(path) as file:
        return np.frombuffer(file.read()[header:], np.uint8)
