# SPDX-License-Identifier: Apache-2.0
"""Tasks on which methods are compared: data, network, length of training, and inputs from elsewhere."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.shared.images import ImageSplit, digits_split, load_split, outside_images
from benchmarks.shared.networks import conv_net, lenet, mlp
from benchmarks.shared.regressions import folds, hold_out, load, standards
from pyro_dvi.bayesian import LearnedScale, classifier, fan_in, regressor, to_bayesian_

__all__ = ["TASKS", "Data", "Task", "digits", "images", "regression", "regression_of"]

Pair = tuple[Tensor, Tensor]


@dataclass
class Data:
    """What one seed trains, chooses and tests with.

    Attributes:
        train: inputs and labels or standardised targets.
        validation: for the choice of temperatures.
        test: the same for all seeds.
        outside: inputs that belong to no class, by name.
        shifted: the test examples, changed; None for none.
        log_unit: log of the targets' standard deviation, which turns densities into those of raw targets.
    """

    train: Pair
    validation: Pair
    test: Pair
    outside: dict[str, Tensor] = field(default_factory=dict)
    shifted: Pair | None = None
    log_unit: float = 0.0


@dataclass(frozen=True)
class Task:
    """A data set with its network.

    Attributes:
        network: makes the untrained network.
        data: of a seed and the folder.
        temperatures: the values that are tried.
        epochs: of training.
        batch_size: of training.
        adam_lr: step size of the methods that use Adam.
        classes: whether it is a classification.
        noise: of regressions.
    """

    network: Callable[[], nn.Sequential]
    data: Callable[[int, str | None], Data]
    temperatures: tuple[float, ...]
    epochs: int
    batch_size: int
    adam_lr: float
    classes: bool = True
    noise: Any = LearnedScale(0.3)

    def model(self, net: nn.Module, num_data: int, prior: float = 1.0) -> Any:
        """The Pyro model around a network; priors are of so many times He's scale."""
        net = to_bayesian_(net, prior_scale=lambda *site: prior * fan_in(*site))
        return classifier(net, num_data) if self.classes else regressor(net, num_data, noise_scale=self.noise)


def digits(seed: int, data_dir: str | None) -> Data:
    split = digits_split(598, 300, seed)
    shuffled = torch.Generator().manual_seed(0)
    order = torch.rand(len(split.test[0]), 64, generator=shuffled).argsort(1)
    pixels = split.test[0].flatten(1).gather(1, order).view_as(split.test[0])
    return Data(split.train, split.validation, split.test, {"digits with shuffled pixels": pixels})


def noisy_digits(seed: int, data_dir: str | None, noise: float = 0.4) -> Data:
    """600 digits with so much noise on pixels between 0 and 1 that nobody reads all of them."""
    split = digits_split(600, 298, seed)
    generator = torch.Generator().manual_seed(seed)

    def noisy(pair: Pair, scale: float) -> Pair:
        pixels = (6.02 * pair[0] + 4.88) / 16
        return pixels + scale * torch.randn(pixels.shape, generator=generator), pair[1]

    order = torch.rand(len(split.test[0]), 64, generator=generator).argsort(1)
    test = noisy(split.test, noise)
    shuffled = test[0].flatten(1).gather(1, order).view_as(test[0])
    return Data(
        noisy(split.train, noise),
        noisy(split.validation, noise),
        test,
        {"shuffled pixels": shuffled},
        shifted=noisy(split.test, 1.5 * noise),
    )


def images(
    name: str,
    num_train: int,
    outside: tuple[str, ...],
    seed: int,
    data_dir: str | None,
    *,
    num_test: int = 3000,
) -> Data:
    """Training and validation images by the seed, the first test images, and images of other kinds."""
    split: ImageSplit = load_split(name, num_train, 1000, num_test, seed, data_dir)
    elsewhere = {other: outside_images(other, name, 500, data_dir) for other in outside}
    return Data(split.train, split.validation, split.test, elsewhere)


def regression(name: str, seed: int, data_dir: str | None) -> Data:
    """The first of five folds is for testing; a seed chooses what is for validation."""
    rest, test = folds(len(load(name, data_dir)[1]), 5)[0]
    return regression_of(name, (*hold_out(rest, 5, seed), test), data_dir)


def regression_of(name: str, parts: tuple[np.ndarray, np.ndarray, np.ndarray], data_dir: str | None) -> Data:
    """Rows for training, validation and testing, standardised by the first."""
    x, y = load(name, data_dir)
    train, validation, test = parts
    centre, unit = y[train].mean(), y[train].std(correction=0)
    middles, scales = standards([x[train]])
    inputs = (x - middles[0]) / scales[0]

    def part(rows: np.ndarray) -> Pair:
        return inputs[rows].float(), ((y[rows] - centre) / unit).float()

    return Data(part(train), part(validation), part(test), log_unit=math.log(unit))


TASKS = {
    "digits": Task(lambda: mlp((64, 100, 10)), digits, (0.01, 0.03, 0.1), 60, 50, 3e-3),
    "energy": Task(
        lambda: mlp((8, 50, 1), nn.ReLU),
        partial(regression, "energy"),
        (0.01, 0.03, 0.1),
        150,
        50,
        1e-2,
        classes=False,
    ),
    "concrete": Task(
        lambda: mlp((8, 50, 1), nn.ReLU),
        partial(regression, "concrete"),
        (0.03, 0.1, 0.3),
        100,
        50,
        1e-2,
        classes=False,
    ),
    "Fashion-MNIST, 2,000": Task(
        conv_net,
        partial(images, "FashionMNIST", 2000, ("MNIST", "notMNIST")),
        (0.03, 0.1),
        20,
        100,
        3e-3,
    ),
    "Fashion-MNIST, 10,000": Task(
        conv_net,
        partial(images, "FashionMNIST", 10_000, ("MNIST", "notMNIST")),
        (0.01, 0.03),
        8,
        100,
        3e-3,
    ),
    "MNIST, 2,000": Task(
        lenet,
        partial(images, "MNIST", 2000, ("FashionMNIST", "notMNIST")),
        (0.01, 0.03, 0.1),
        20,
        100,
        3e-3,
    ),
    "CIFAR-10, 2,000": Task(
        lambda: lenet(channels=3, padding=0),
        partial(images, "CIFAR10", 2000, ("noise",)),
        (0.03, 0.1),
        20,
        100,
        3e-3,
    ),
}
