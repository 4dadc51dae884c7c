# SPDX-License-Identifier: Apache-2.0
"""MNVI, mean-field moments, MAP, MC dropout and sampled VI on digits and MNIST, each at its own KL weight."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_dvi as dvi
from benchmarks.moments import image_tables
from benchmarks.shared import images, networks
from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings
from benchmarks.shared.images import ImageSplit
from benchmarks.shared.methods import METHODS, Training, with_dropout
from pyro_dvi import metrics

TUNING_SEED = 100
DROPOUT_RATES = (0.1, 0.2, 0.3)
KL_WEIGHTS = (0.01, 0.03, 0.1)  # to begin with
COMPARED = ("MNVI", "mean-field moments", "MAP", "MC dropout", "sampled VI")


@dataclass(frozen=True)
class Task:
    """A data set with its network.

    Attributes:
        split: from a seed and the folder with the data.
        network: makes the untrained network.
        tuned_on: the task whose KL weights it takes over; None if it has its own.
    """

    split: Callable[[int, str | None], ImageSplit]
    network: Callable[[], nn.Sequential]
    batch_size: int
    epochs: int
    lr: float
    seeds: tuple[int, ...]
    tuned_on: str | None = None


def mnist(num_train: int, num_validation: int, num_test: int, seed: int, data_dir: str | None) -> ImageSplit:
    """Images of MNIST."""
    return images.load_split("MNIST", num_train, num_validation, num_test, seed, data_dir)


PERCEPTRON = partial(networks.mlp, (64, 50, 50, 10), nn.ReLU)
LENET = partial(networks.lenet, activation=nn.ReLU)
FULL = Task(partial(mnist, 55_000, 5_000, 10_000), LENET, 100, 8, 2e-3, seeds=(0,), tuned_on="mnist_5000")
TASKS = {
    "digits": Task(
        lambda seed, _: images.digits_split(500, 300, seed), PERCEPTRON, 50, 60, 3e-3, seeds=(0, 1, 2, 3, 4)
    ),
    "mnist_5000": Task(partial(mnist, 5000, 1000, 5000), LENET, 100, 15, 3e-3, seeds=(0, 1, 2)),
    "mnist": FULL,
    "mnist_50_epochs": replace(FULL, epochs=50, seeds=(0, 1, 2, 3, 4)),
}


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """Ask for the tuning of every method, then for its training with every seed."""
    wanted: list[Settings] = []
    for name, method in product(TASKS, COMPARED):
        if name == "mnist_50_epochs" and budget == "small":
            continue
        of = TASKS[name].tuned_on or name
        tuning = {"stage": "tune", "task": of, "method": method, "seed": TUNING_SEED}
        tuned = next((row for row in rows if tuning.items() <= row.items()), None)
        if tuned is None:
            wanted += [tuning] * (tuning not in wanted)
            continue
        chosen = {"kl_weight": tuned["kl_weight"], "dropout": tuned["dropout"]}
        run = {"stage": "test", "task": name, "method": method, **chosen}
        wanted += [{**run, "seed": seed} for seed in TASKS[name].seeds]
    return wanted


def run(settings: Settings, data_dir: str | None) -> Row:
    """Tune a method, or train and test it once."""
    task, method = TASKS[settings["task"]], settings["method"]
    data = task.split(settings["seed"], data_dir)
    if settings["stage"] == "tune":
        return tuned(task, method, data)
    model, guide = trained(task, method, data, settings["dropout"], settings["kl_weight"])
    count = sum(parameter.numel() for parameter in guide.parameters())
    return {**scores(model, guide, data.test, method), "parameters": count}


def tuned(task: Task, method: str, data: ImageSplit) -> Row:
    """Choose the KL weight, for each dropout rate."""
    found = {}
    for dropout in DROPOUT_RATES if method == "MC dropout" else (0.0,):
        found[dropout] = dvi.tune(
            partial(trained, task, method, data, dropout),
            data.validation,
            {"kl_weight": KL_WEIGHTS},
            max_trainings=9,
            score=lambda model, guide, pair: scores(model, guide, pair, method)["nll"],
        )
    best = min(found, key=lambda dropout: min(found[dropout].table["score"]))
    tried = [
        [dropout, *pair]
        for dropout, one in found.items()
        for pair in zip(one.table["kl_weight"], one.table["score"], strict=True)
    ]  # fmt: skip
    return {"kl_weight": found[best].settings["kl_weight"], "dropout": best, "tried": tried}


def trained(task: Task, method: str, data: ImageSplit, dropout: float, kl_weight: float) -> tuple[Any, Any]:
    """Return a model and its guide, trained anew."""

    def build() -> Any:
        net = task.network()
        net = with_dropout(net, dropout) if dropout else net
        return dvi.classifier(
            dvi.to_bayesian_(net, prior_scale=dvi.bayesian.fan_in), num_data=len(data.train[0])
        )

    loader = DataLoader(TensorDataset(*data.train), task.batch_size, shuffle=True)
    training = Training(kl_weight, task.lr, task.epochs, loader, data.validation)
    return METHODS[method].fit(build, training)


def scores(model: Any, guide: Any, data: Any, method: str) -> Row:
    """Scores on images."""
    prediction = dvi.predict(model, guide, data, METHODS[method].rule, seed=0)
    p, y = prediction.probabilities, data[1]
    curve = metrics.rejection_curve(p, y)
    return {
        "num_test": len(y),
        "error": 1 - metrics.accuracy(p, y),
        "nll": metrics.nll(prediction.log_likelihood()).value,
        "ece": metrics.expected_calibration_error(p, y, 20),
        "aumrc": metrics.aumrc(p, y),
        **{
            f"mr{share}": float(np.interp(share / 100, curve.rejected, curve.error)) for share in (10, 25, 50)
        },
    }


def report(rows: list[Row], folder: Path) -> str:
    """A section for each task."""
    return image_tables.text(rows, {name: task.epochs for name, task in TASKS.items()}, COMPARED)


BENCHMARK = Benchmark(
    "moments_images",
    "How good are the predictions of moment propagation on digits and MNIST?",
    plan,
    run,
    report,
)
