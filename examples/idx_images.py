# SPDX-License-Identifier: Apache-2.0
"""MNIST and Fashion-MNIST for the examples, from local files or downloaded by torchvision."""

import gzip
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

__all__ = ["idx_images"]


def idx_images(name: str, folder: Path, train: bool) -> tuple[Tensor, Tensor]:
    """Return images ``[n, 1, 28, 28]`` as bytes, and labels.

    Args:
        name: "MNIST" or "FashionMNIST".
        folder: folder with ``<name>/raw/*-ubyte.gz``; if the files are missing, torchvision downloads them there.
        train: whether to return the 60,000 training images or the 10,000 test images.
    """
    stem = folder / name / "raw" / ("train" if train else "t10k")
    if not Path(f"{stem}-images-idx3-ubyte.gz").exists():
        import torchvision

        getattr(torchvision.datasets, name)(str(folder), train=train, download=True)
    with gzip.open(f"{stem}-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read()[16:], np.uint8).reshape(-1, 1, 28, 28)
    with gzip.open(f"{stem}-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read()[8:], np.uint8)
    return torch.from_numpy(images.copy()), torch.from_numpy(labels.astype(np.int64))
