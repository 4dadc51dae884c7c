# SPDX-License-Identifier: Apache-2.0
"""How methods are compared: each one tuned on validation data with the same number of trainings, MAP first.

A method has two or three settings: the step size, the scale of the prior (for a point estimate the weight decay), and
the temperature of the posterior, or the rate of dropout. ``dvi.tune`` chooses one after the other by the NLL of the
validation data of three seeds that are not tested, each with its own data, goes beyond an end of its values where the
best is there, and then tries the neighbours of the best; at most 12 settings for a method on a task. All methods train
the same network for the same number of steps with a step size that falls to zero, and ``kl_weight=1``. Ensembles take
the settings of their members, and Laplace those of MAP.

Then each method trains with seeds of its own at these settings. One training has two scores: where it ended, and with
the weights of the epoch whose validation NLL at the mean was lowest. MAP's probabilities are also scored after
temperature scaling on the validation data.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from time import process_time
from typing import Any

import pyro
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import pyro_dvi as dvi
from benchmarks.shared.benchmark import Row
from benchmarks.shared.methods import METHODS, Method, Training, with_dropout
from benchmarks.shared.tasks import Data, Task
from pyro_dvi.errors import NonFiniteError

__all__ = ["CONTESTANTS", "MAX_TRAININGS", "Contestant", "tested", "tuned"]

MAX_TRAININGS, TUNING_SEEDS = 12, 3
PRIOR = {"prior": (1.0, 1.7, 3.0, 5.5, 10.0)}  # times He's scale
POINT = {"lr": (0.003, 0.01, 0.03, 0.1)} | PRIOR
COLD = {"temperature": (0.01, 0.1, 1.0)}
NATURAL = {"max_step": (0.05, 0.15, 0.5)} | PRIOR


@dataclass(frozen=True)
class Contestant:
    """A method with what is tuned of it.

    Attributes:
        method: trains and predicts.
        space: the settings with the values to begin with.
        like: the contestant whose settings it takes; None if it has its own.
    """

    method: Method
    space: dict[str, tuple[float, ...]]
    like: str | None = None


def _own(name: str, space: dict[str, tuple[float, ...]]) -> Contestant:
    return Contestant(METHODS[name], space)


def _as(name: str, other: str) -> Contestant:
    return Contestant(METHODS[name], {}, like=other)


CONTESTANTS = {
    "MAP": _own("MAP", POINT),
    "ensemble of 2 MAP": _as("ensemble of 2 MAP", "MAP"),
    "ensemble of 5 MAP": _as("ensemble of 5 MAP", "MAP"),
    "MC dropout": _own("MC dropout", POINT | {"rate": (0.05, 0.1, 0.2)}),
    "sampled VI": _own("sampled VI", POINT | COLD),
    "Variational Laplace": _own("VL", POINT | COLD),
    "ensemble of 5 VL": _as("ensemble of 5 VL", "Variational Laplace"),
    "MNVI": _own("MNVI", POINT | COLD),
    "mean-field moments": _own("mean-field moments", POINT | COLD),
    "VOGN": _own("VOGN", NATURAL | COLD),
    "IVON": _own("IVON", NATURAL | COLD),
    "Noisy K-FAC": _own("Noisy K-FAC", NATURAL | COLD),
    "Laplace, last layer": _as("Laplace, last layer", "MAP"),
    "Laplace, Kronecker": _as("Laplace, Kronecker", "MAP"),
}


def tuned(task: Task, contestant: Contestant, seed: int, data_dir: str | None) -> Row:
    """Choose the settings of a method by its scores with several seeds, from this one on."""
    method, rows = contestant.method, dict[int, Tensor]()
    parts = [task.data(seed + k, data_dir) for k in range(TUNING_SEEDS)]

    def train(**settings: float) -> tuple[Any, Any]:
        scored: list[Tensor] = []
        for data in parts:
            pyro.clear_param_store()
            model, guide = _trained(task, method, data, settings)
            scored.append(-_predicted(model, guide, data.validation, method).log_likelihood())
        rows[id(guide)] = torch.cat(scored)
        return model, guide

    found = dvi.tune(
        train,
        None,
        contestant.space,
        score=lambda model, guide, _: rows[id(guide)],
        max_trainings=MAX_TRAININGS,
        seed=seed,
        progress=False,
    )
    return {"chosen": found.settings, "tried": {name: list(found.table[name]) for name in found.table}}


def tested(task: Task, contestant: Contestant, data: Data, settings: dict[str, float]) -> Row:
    """Train at the chosen settings and score the test data: "last" epoch, and "best" one by early stopping."""
    method, row, looking = contestant.method, Row(), _Stopwatch()

    def watch(model: Any, guide: Any) -> dict[str, Any]:
        def at_the_end(state: Any) -> None:
            if state.epoch == task.epochs:
                row["last"] = _scores(task, model, guide, data, method)

        stopping = dvi.training.EarlyStopping(patience=task.epochs)
        validate = looking(lambda: dvi.predict(model, guide, data.validation, dvi.AtMean()).metrics()["nll"])
        return {"validate": validate, "callbacks": [looking(at_the_end)], "early_stopping": stopping}

    start = process_time()
    own = {} if contestant.like else {"watch": watch}
    try:
        model, guide = _trained(task, method, data, settings, **own)
    except NonFiniteError as error:
        return {"failed": str(error).split(";")[0]}
    row["training_seconds"] = process_time() - start - looking.seconds
    row["last" if contestant.like else "best"] = _scores(task, model, guide, data, method)
    return row


class _Stopwatch:
    """Adds up the time in functions that belong to no training."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = process_time()
            try:
                return function(*args)
            finally:
                self.seconds += process_time() - start

        return timed


def _trained(
    task: Task, method: Method, data: Data, settings: dict[str, float], **options: Any
) -> tuple[Any, Any]:
    """Return a model and its guide, or the mixture of an ensemble, trained anew."""
    settings = dict(settings)
    rate, prior = settings.pop("rate", None), settings.pop("prior")
    natural = {"max_step": settings.pop("max_step")} if "max_step" in settings else {}
    loader = DataLoader(TensorDataset(*data.train), task.batch_size, shuffle=True)
    lr = settings.pop("lr", 0.0)
    training = Training(1.0, lr, task.epochs, loader, data.validation, natural=natural, **settings, **options)

    def build() -> Any:
        net = task.network()
        return task.model(net if rate is None else with_dropout(net, rate), len(data.train[0]), prior)

    return replace(method, net=lambda net: net).fit(build, training)


def _predicted(model: Any, guide: Any, data: Any, method: Method) -> Any:
    return dvi.predict(model, guide, data, method.rule, seed=0)


def _scores(task: Task, model: Any, guide: Any, data: Data, method: Method) -> Row:
    """Scores of the test data; of classes also the recognition of other inputs, and after temperature scaling."""
    predicted = partial(_predicted, model, guide, method=method)
    prediction = predicted(data.test)
    metrics = prediction.metrics()
    found: Row = {"nll": metrics["nll"] + data.log_unit}
    if not task.classes:
        return found | {name: metrics[name] for name in ("rmse", "coverage_95")}
    found |= {name: metrics[name] for name in ("accuracy", "brier", "ece")}
    for name, x in data.outside.items():
        found[f"auroc {name}"] = float(dvi.metrics.auroc(prediction.entropy, predicted(x).entropy))
    if data.shifted is not None:
        found["nll, shifted"] = predicted(data.shifted).metrics()["nll"]
    validation = predicted(data.validation)
    temperature = best_temperature(validation.probabilities, data.validation[1])
    scaled = scaled_by(prediction.probabilities, temperature)
    found["scaled nll"] = float(-_of_labels(scaled, data.test[1]).log().mean())
    found["scaled ece"] = float(dvi.metrics.expected_calibration_error(scaled, data.test[1]))
    return found


def scaled_by(probabilities: Tensor, temperature: float) -> Tensor:
    """Return the softmax of logits over a temperature."""
    return (probabilities.clamp_min(1e-12).log() / temperature).softmax(-1)


def _of_labels(probabilities: Tensor, labels: Tensor) -> Tensor:
    return probabilities.gather(-1, labels[:, None].to(probabilities.device))[:, 0].clamp_min(1e-12)


def best_temperature(probabilities: Tensor, labels: Tensor) -> float:
    """Return the temperature with the lowest NLL, of 300 between 0.25 and 16.

    Source: Guo et al. (2017), "On calibration of modern neural networks".
    """
    candidates = torch.logspace(-2, 4, 300, base=2.0).tolist()
    return min(candidates, key=lambda t: float(-_of_labels(scaled_by(probabilities, t), labels).log().mean()))
