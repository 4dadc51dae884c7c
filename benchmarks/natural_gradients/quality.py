# SPDX-License-Identifier: Apache-2.0
"""VOGN, OGN and IVON with the library's defaults beside MAP, MC dropout and sampled VI on seven tasks.

All train the same network from the same prior. Each method and prediction rule has its own KL weight, by the NLL of
validation data with a seed that the tables do not use. VOGN trains once more for three times as long.
"""

from math import exp
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, TensorDataset

import pyro_dvi as dvi
from benchmarks.natural_gradients import quality_tables
from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings
from benchmarks.shared.methods import METHODS, NUM_SAMPLES, Training
from benchmarks.shared.tasks import TASKS, Data, Task
from pyro_dvi import metrics
from pyro_dvi.predictive import AtMean, PredictionRule, Samples

TUNING_SEED, SEEDS = 4, (0, 1, 2)  # regressions have five folds of validation data
RULES: dict[str, PredictionRule] = {"mean": AtMean(), "sampled": Samples(NUM_SAMPLES)}
# The rules of each method; KL weights grow by the last.
COMPARED = {
    "MAP": ("mean",),
    "MC dropout": ("sampled",),
    "sampled VI": ("mean", "sampled"),
    "VOGN": ("mean", "sampled"),
    "OGN": ("mean", "sampled"),
    "IVON": ("mean", "sampled"),
}
KL_WEIGHTS = (0.01, 0.03, 0.1)  # to begin with


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """Ask for the KL weights of each method, then for its training at those with every seed."""
    wanted: list[Settings] = []
    for task in TASKS:
        for method, longer in [*((method, 1) for method in COMPARED), ("VOGN", 3)]:
            about = {"task": task, "method": method, "times": longer}
            tuning = {**about, "stage": "tune", "seed": TUNING_SEED}
            found = next((row for row in rows if tuning.items() <= row.items()), None)
            if found is None:
                wanted.append(tuning)
                continue
            weights = sorted({quality_tables.best(found, rule) for rule in COMPARED[method]})
            wanted += [
                {**about, "stage": "test", "seed": seed, "kl_weight": weight}
                for weight in weights
                for seed in SEEDS
            ]
    return wanted


def run(settings: Settings, data_dir: str | None) -> Row:
    """Try KL weights, or train and test once."""
    task, method = TASKS[settings["task"]], settings["method"]
    data, epochs, tried = task.data(settings["seed"], data_dir), settings["times"] * task.epochs, []

    def train(kl_weight: float) -> tuple[Any, Any]:
        model = task.model(METHODS[method].net(task.network()), len(data.train[0]))
        loader = DataLoader(TensorDataset(*data.train), task.batch_size, shuffle=True)
        training = Training(kl_weight, task.adam_lr, epochs, loader, data.validation)
        tried.append({"kl_weight": kl_weight})
        return METHODS[method].train(model, training)

    def validation_nll(model: Any, guide: Any, validation: Any) -> float:
        for rule in COMPARED[method]:
            nll = dvi.predict(model, guide, validation, RULES[rule], seed=0).metrics()["nll"]
            tried[-1][rule] = nll + data.log_unit
        return tried[-1][COMPARED[method][-1]]

    if settings["stage"] == "tune":
        dvi.tune(
            train,
            data.validation,
            {"kl_weight": KL_WEIGHTS},
            score=validation_nll,
            max_trainings=6,
            progress=False,
        )
        return {"tried": sorted(tried, key=lambda one: one["kl_weight"])}
    model, guide = train(settings["kl_weight"])
    return {rule: scores(task, model, guide, data, RULES[rule]) for rule in COMPARED[method]}


def scores(task: Task, model: Any, guide: Any, data: Data, rule: PredictionRule) -> Row:
    """Scores of test data by one prediction rule."""
    prediction = dvi.predict(model, guide, data.test, rule, seed=0)
    found = prediction.metrics()
    result: Row = {"nll": found["nll"] + data.log_unit}
    if not task.classes:
        return {**result, "rmse": found["rmse"] * exp(data.log_unit)}
    result |= {name: found[name] for name in ("accuracy", "ece")}
    for name, x in data.outside.items():
        entropy = dvi.predict(model, guide, x, rule, seed=0).entropy
        result[f"AUROC, {name}"] = metrics.auroc(prediction.entropy, entropy)
    return result


def report(rows: list[Row], folder: Path) -> str:
    """Differences on all tasks, then a section for each."""
    return quality_tables.text(rows, list(TASKS), COMPARED, NUM_SAMPLES)


BENCHMARK = Benchmark(
    "natural_quality",
    "How good are the predictions of VOGN, OGN and IVON with their defaults?",
    plan,
    run,
    report,
)
