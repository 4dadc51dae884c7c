# SPDX-License-Identifier: Apache-2.0
"""MNVI, mean-field moments, MAP, MC dropout and sampled VI on digits, each at its own KL weight."""

from functools import partial
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
from pyro_dvi.predictive import PredictionRule

TUNING_SEED = 100
DROPOUT_RATES = (0.1, 0.2, 0.3)
KL_WEIGHTS = (0.01, 0.03, 0.1)  # to begin with
COMPARED = ("MNVI", "mean-field moments", "MAP", "MC dropout", "sampled VI")
BATCH_SIZE, EPOCHS, LEARNING_RATE = 50, 60, 3e-3


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """Ask for the tuning of every method, then for its training with every seed."""
    wanted: list[Settings] = []
    for method in COMPARED:
        tuning = {"stage": "tune", "task": "digits", "method": method, "seed": TUNING_SEED}
        tuned = next((row for row in rows if tuning.items() <= row.items()), None)
        if tuned is None:
            wanted.append(tuning)
            continue
        chosen = {"kl_weight": tuned["kl_weight"], "dropout": tuned["dropout"]}
        run = {"stage": "test", "task": "digits", "method": method, **chosen}
        wanted += [{**run, "seed": seed} for seed in range(5 if budget == "small" else 20)]
    return wanted


def run(settings: Settings, data_dir: str | None) -> Row:
    """Tune a method, or train and test it once."""
    method = settings["method"]
    data = images.digits_split(500, 300, settings["seed"])
    if settings["stage"] == "tune":
        return tuned(method, data)
    model, guide = trained(method, data, settings["dropout"], settings["kl_weight"])
    count = sum(parameter.numel() for parameter in guide.parameters())
    return {**scores(model, guide, data.test, METHODS[method].rule), "parameters": count}


def tuned(method: str, data: ImageSplit) -> Row:
    """Choose the KL weight, for each dropout rate."""
    found = {}
    for dropout in DROPOUT_RATES if method == "MC dropout" else (0.0,):
        found[dropout] = dvi.tune(
            partial(trained, method, data, dropout),
            data.validation,
            {"kl_weight": KL_WEIGHTS},
            max_trainings=9,
            score=lambda model, guide, pair: scores(model, guide, pair, METHODS[method].rule)["nll"],
        )
    best = min(found, key=lambda dropout: min(found[dropout].table["score"]))
    tried = [
        [dropout, *pair]
        for dropout, one in found.items()
        for pair in zip(one.table["kl_weight"], one.table["score"], strict=True)
    ]  # fmt: skip
    return {"kl_weight": found[best].settings["kl_weight"], "dropout": best, "tried": tried}


def trained(method: str, data: ImageSplit, dropout: float, kl_weight: float) -> tuple[Any, Any]:
    """Return a model and its guide, trained anew."""

    def build() -> Any:
        net = networks.mlp((64, 50, 50, 10), nn.ReLU)
        net = with_dropout(net, dropout) if dropout else net
        return dvi.classifier(
            dvi.to_bayesian_(net, prior_scale=dvi.bayesian.fan_in), num_data=len(data.train[0])
        )

    loader = DataLoader(TensorDataset(*data.train), BATCH_SIZE, shuffle=True)
    training = Training(kl_weight, LEARNING_RATE, EPOCHS, loader, data.validation)
    return METHODS[method].fit(build, training)


def scores(model: Any, guide: Any, data: Any, rule: PredictionRule | None) -> Row:
    """Scores on images."""
    prediction = dvi.predict(model, guide, data, rule, seed=0)
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
    """Scores, differences and what was tried."""
    return image_tables.digits(rows, EPOCHS, COMPARED)


BENCHMARK = Benchmark(
    "moments_images", "How good are the predictions of moment propagation on digits?", plan, run, report
)
