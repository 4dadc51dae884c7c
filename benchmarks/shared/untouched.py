# SPDX-License-Identifier: Apache-2.0
"""Which method should one take? All of them on data that nobody has looked at before, each at its own KL weight.

Defaults and recipes of the library were chosen on other tasks. Here every method trains with them as they are; what is
tuned is its KL weight, by ``dvi.tune`` on validation data of a seed of its own. Then it trains once for each
of the seeds, and its test data are scored once. All methods have the same network, prior, minibatches and epochs.

- Images: test images 5,001 to 10,000 of Fashion-MNIST (with ``gpu`` of MNIST, too), which no other choice has used.
- Regressions: UCI sets on which neither a default nor a recipe of the library was chosen, by their standard splits:
  wine, and with ``gpu`` kin8nm, which takes more epochs than two cores have time for.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_dvi as dvi
from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings
from benchmarks.shared.methods import METHODS, Method, Training
from benchmarks.shared.networks import conv_net, lenet, mlp
from benchmarks.shared.regressions import hold_out, standard_split
from benchmarks.shared.tables import mean_sd, paired, provenance, table
from benchmarks.shared.tasks import Data, Task, images, regression_of

ENSEMBLE = "ensemble of 5 MAP"  # takes the KL weight of MAP
COMPARED = tuple(name for name in METHODS if name not in ("ensemble of 5 VL", "OGN"))
TUNING_SEED, SEEDS = 100, (0, 1, 2, 3, 4)
START, MAX_TRAININGS = (0.03, 0.1, 0.3), 5


def _unseen(name: str, num_train: int, outside: tuple[str, ...], seed: int, data_dir: str | None) -> Data:
    data = images(name, num_train, outside, seed, data_dir, num_test=10_000)
    data.test = data.test[0][5000:], data.test[1][5000:]
    return data


def _split(name: str, seed: int, data_dir: str | None) -> Data:
    """One of the standard splits; a tenth of its training rows is for validation."""
    rest, test = standard_split(name, seed % 20, data_dir)
    return regression_of(name, (*hold_out(rest, 10, 0, seed), test), data_dir)


def _regression(name: str, epochs: int) -> Task:
    return Task(
        lambda: mlp((11 if "wine" in name else 8, 50, 1)), partial(_split, name), (), epochs, 50, 1e-2, False
    )


def _images(network: Callable[[], nn.Sequential], name: str, size: int, epochs: int) -> Task:
    outside = ("notMNIST", "MNIST" if name == "FashionMNIST" else "FashionMNIST")
    return Task(network, partial(_unseen, name, size, outside), (), epochs, 100, 3e-3)


TASKS: dict[Budget, dict[str, Task]] = {
    "small": {
        "Fashion-MNIST, 2,000": _images(conv_net, "FashionMNIST", 2000, 20),
        "wine": _regression("wine-quality-red", 30),
    },
    "gpu": {
        "Fashion-MNIST, 50,000": _images(partial(conv_net, width=32), "FashionMNIST", 50_000, 40),
        "MNIST, 50,000": _images(lenet, "MNIST", 50_000, 40),
        "kin8nm, 200 epochs": _regression("kin8nm", 200),
        "wine, 200 epochs": _regression("wine-quality-red", 200),
    },
}
ALL_TASKS = TASKS["gpu"] | TASKS["small"]


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """First tune each method, then train it with every seed at the weight that was chosen."""
    wanted = []
    for task in TASKS[budget]:
        chosen = {
            row["method"]: row["kl_weight"] for row in rows if row["task"] == task and row["stage"] == "tune"
        }
        for method in COMPARED:
            if method != ENSEMBLE:
                wanted.append({"stage": "tune", "task": task, "method": method, "seed": TUNING_SEED})
            weight = chosen.get("MAP" if method == ENSEMBLE else method)
            if weight is not None:
                settings = {"stage": "test", "task": task, "method": method, "weight": weight}
                seeds = SEEDS if budget == "gpu" or not ALL_TASKS[task].classes else SEEDS[:3]
                wanted += [{**settings, "seed": seed} for seed in seeds]
    return wanted


def run(settings: Settings, data_dir: str | None) -> Row:
    """Choose the KL weight, or train at the chosen one and score the test data."""
    task, method, seed = ALL_TASKS[settings["task"]], METHODS[settings["method"]], settings["seed"]
    data = task.data(seed, data_dir)
    trained = partial(train, task, method, data)
    if settings["stage"] == "tune":
        score = partial(nll, method=method)
        tuned = dvi.tune(
            trained,
            data.validation,
            {"kl_weight": START},
            score=score,
            max_trainings=MAX_TRAININGS,
            seed=seed,
            progress=False,
        )
        return {
            "kl_weight": tuned.settings["kl_weight"],
            "tried": tuned.table["kl_weight"],
            "scores": tuned.table["score"],
        }
    start = process_time()
    model, guide = trained(settings["weight"])
    return {"training_seconds": process_time() - start, **scores(task, model, guide, data, method.rule)}


def train(task: Task, method: Method, data: Data, kl_weight: float) -> tuple[Any, Any]:
    """Build and train by a method."""
    loader = DataLoader(TensorDataset(*data.train), task.batch_size, shuffle=True)
    training = Training(kl_weight, task.adam_lr, task.epochs, loader, data.validation)
    return method.fit(lambda: task.model(method.net(task.network()), len(data.train[0])), training)


def nll(model: Any, guide: Any, validation: Any, method: Method) -> float:
    """Validation NLL by the rule of the method."""
    return dvi.predict(model, guide, validation, method.rule, seed=0).metrics()["nll"]


def scores(task: Task, model: Any, guide: Any, data: Data, rule: Any) -> Row:
    """Scores of the test data, and of telling other inputs from them by the entropy."""
    prediction = dvi.predict(model, guide, data.test, rule, seed=0)
    found = prediction.metrics()
    result = {"nll": found["nll"] + data.log_unit}
    if not task.classes:
        return result
    for name, x in data.outside.items():
        entropy = dvi.predict(model, guide, x, rule, seed=0).entropy
        result[f"auroc {name}"] = dvi.metrics.auroc(prediction.entropy, entropy)
    return result | {name: found[name] for name in ("accuracy", "ece")}


def report(rows: list[Row], folder: Path) -> str:
    """The summary, then a table for each task."""
    tested = [row for row in rows if row["stage"] == "test"]
    tasks = [task for task in ALL_TASKS if any(row["task"] == task for row in tested)]
    text = [provenance("untouched", rows), _summary(tested, tasks)]
    for task in tasks:
        text += [f"### {task}", _details([row for row in rows if row["task"] == task])]
    return "\n\n".join(text)


def _summary(rows: list[Row], tasks: list[str]) -> str:
    """Differences of the NLL from MAP's and from the ensemble's, and the cost of a training over MAP's."""
    lines = []
    for method in COMPARED:
        cells: list[str | None] = []
        for task in tasks:
            ours, point = _by_seed(rows, task, method), _by_seed(rows, task, "MAP")
            cells += [_difference(ours, point), _difference(ours, _by_seed(rows, task, ENSEMBLE))]
            seconds = "training_seconds"
            costs = [ours[seed][seconds] / point[seed][seconds] for seed in ours.keys() & point.keys()]
            cells.append(f"{median(costs):.1f}" if costs else None)
        lines.append([method, *cells])
    header = [name for task in tasks for name in (f"{task}: to MAP", "to the ensemble", "cost")]
    return table(["method", *header], lines).rstrip()


def _difference(ours: dict[int, Row], theirs: dict[int, Row], score: str = "nll") -> str | None:
    common = sorted(ours.keys() & theirs.keys())
    if not common or ours == theirs:
        return None
    return str(paired([ours[seed][score] for seed in common], [theirs[seed][score] for seed in common]))


def _detection(tested: list[Row]) -> str:
    """Differences of the AUROC from MAP's, for the data sets of foreign images that a task has."""
    names = [key for key in tested[0] if key.startswith("auroc")]
    if not names:
        return ""
    task, methods = tested[0]["task"], dict.fromkeys(row["method"] for row in tested)
    point = _by_seed(tested, task, "MAP")
    lines = [
        [method, *(_difference(_by_seed(tested, task, method), point, name) for name in names)]
        for method in methods
        if method != "MAP"
    ]
    words = "AUROC of the predictive entropy over that of MAP; above zero, foreign images are found more reliably.\n\n"
    return "\n\n" + words + table(["method", *names], lines).rstrip()


def _by_seed(rows: list[Row], task: str, method: str) -> dict[int, Row]:
    return {row["seed"]: row for row in rows if (row["task"], row["method"]) == (task, method)}


def _details(rows: list[Row]) -> str:
    tested = [row for row in rows if row["stage"] == "test"]
    names = [key for key in tested[0] if key in ("nll", "accuracy", "ece") or key.startswith("auroc")]
    lines = []
    for method in dict.fromkeys(row["method"] for row in tested):
        own = sorted((row for row in tested if row["method"] == method), key=lambda row: row["seed"])
        tuned = [row for row in rows if row["stage"] == "tune" and row["method"] == method]
        edge = any(row["kl_weight"] in (min(row["tried"]), max(row["tried"])) for row in tuned)
        cells = [mean_sd([row[name] for row in own]) for name in names]
        lines.append([method, *cells, f"{own[0]['weight']:g}" + " (end of the grid)" * edge])
    return table(["method", *names, "KL weight"], lines).rstrip() + _detection(tested)


BENCHMARK = Benchmark(
    "untouched", "Which method should one take, on data nobody has looked at?", plan, run, report
)
