# SPDX-License-Identifier: Apache-2.0
"""Do README's error bars hold on tasks that they were not written for?

README's first two blocks run as printed from the network on, with other data: only the sizes of network and data are
replaced. The same trained network is scored by itself, and after temperature scaling on the same validation data.
"""

import re
import warnings
from pathlib import Path
from typing import Any

import pyro
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_dvi as dvi
from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings
from benchmarks.shared.protocol import best_temperature, scaled_by
from benchmarks.shared.recipe import README, SEEDS, TASKS
from benchmarks.shared.tables import mean_sd, paired, provenance, table

CONTESTANTS = ("the network", "temperature scaling", "dvi.Laplace")


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """Ask for every task with every seed."""
    return [{"task": task, "seed": seed} for task in TASKS for seed in SEEDS]


def blocks(inputs: int, classes: int) -> str:
    """Return README's first two blocks from the network to the prediction, for another network."""
    first, second = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[:2]
    code = first[first.index("net = ") : first.index("x, y = test[:]")] + "x, y = test[:]\n"
    code += second[: second.index("print(")]
    for there, here in (
        ("nn.Linear(64, 100)", f"nn.Linear({inputs}, 100)"),
        ("nn.Linear(100, 10)", f"nn.Linear(100, {classes})"),
    ):
        assert there in code, f"README has no {there} any more"
        code = code.replace(there, here)
    return code


def run(settings: Settings, data_dir: str | None) -> Row:
    """Score the network, its scaled probabilities and its Laplace approximation on the test data."""
    parts = TASKS[settings["task"]](data_dir, settings["seed"])
    train, validation, test = (TensorDataset(*part) for part in parts)
    x, y = parts[0]
    torch.manual_seed(settings["seed"])
    names: dict[str, Any] = {"nn": nn, "torch": torch, "dvi": dvi, "validation": validation, "test": test}
    names["loader"] = DataLoader(train, batch_size=100, shuffle=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", dvi.errors.DviWarning)
        exec(blocks(x.shape[1], int(y.max()) + 1), names)
    net, prediction = names["net"], names["prediction"]
    pyro.clear_param_store()
    with torch.no_grad():
        held_out, own = (net(part[0]).softmax(-1) for part in parts[1:])
    temperature = best_temperature(held_out, parts[1][1])
    probabilities = (own, scaled_by(own, temperature), prediction.probabilities)
    metrics = {name: _scores(p, parts[2][1]) for name, p in zip(CONTESTANTS, probabilities, strict=True)}
    return metrics | {"temperature": temperature, "warnings": sorted({str(w.message) for w in caught})}


def _scores(probabilities: Tensor, labels: Tensor) -> dict[str, float]:
    """Return NLL, accuracy and calibration of probabilities."""
    nll = nn.functional.nll_loss(probabilities.clamp_min(1e-12).log(), labels)
    accuracy = (probabilities.argmax(-1) == labels).double().mean()
    ece = dvi.metrics.expected_calibration_error(probabilities, labels)
    return {"nll": float(nll), "accuracy": float(accuracy), "ece": float(ece)}


def report(rows: list[Row], folder: Path) -> str:
    """Write a line for each task and contestant."""
    lines = []
    for task in TASKS:
        own = [row for row in rows if row["task"] == task]
        for name in CONTESTANTS if own else ():
            nll = [row[name]["nll"] for row in own]
            others = [
                paired(nll, [row[rival]["nll"] for row in own]) if rival != name else None
                for rival in CONTESTANTS[:2]
            ]
            scores = [mean_sd([row[name][key] for row in own]) for key in ("accuracy", "ece")]
            lines.append([task, name, mean_sd(nll), *others, *scores])
    header = [
        "task",
        "prediction",
        "NLL",
        "minus the network's",
        "minus temperature scaling's",
        "accuracy",
        "ECE",
    ]
    about = (
        "Mean ± standard deviation over seeds; differences are paired by seed, ± half the 95 % interval, and bold if "
        "the interval excludes zero. All three predictions use the same trained network and validation data."
    )
    return "\n\n".join([provenance("first_block", rows), about, table(header, lines)])


BENCHMARK = Benchmark(
    "first_block", "Do the README's error bars also work on other tasks?", plan, run, report
)
