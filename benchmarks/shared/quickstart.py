# SPDX-License-Identifier: Apache-2.0
"""What does the quickstart show, over five seeds, and at which KL weights?

The KL weights of ``examples/quickstart.py`` are chosen here, for every method and task by itself: trainings with a seed
of their own, scored on validation data that no seed tests. The example holds the weights as constants, and a test holds
them to these lines.
"""

import importlib.util
import sys
from functools import cache, partial
from pathlib import Path
from statistics import mean
from types import ModuleType
from typing import Any

import pyro_dvi as dvi
from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings
from benchmarks.shared.tables import mean_sd, paired, provenance, table

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart.py"
TUNING_SEED, SEEDS = 100, (0, 1, 2, 3, 4)
START, MAX_TRAININGS = (0.03, 0.1, 0.3), 6
TASKS = ("curve", "digits")


@cache
def example() -> ModuleType:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("quickstart", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["quickstart"] = module  # its data classes look themselves up there
    spec.loader.exec_module(module)
    return module


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """First tune each method on each task, then train it with every seed at the weight that was chosen."""
    chosen = weights(rows)
    wanted: list[Settings] = []
    for task in TASKS:
        for method in example().METHODS:
            wanted.append({"stage": "tune", "task": task, "method": method, "seed": TUNING_SEED})
            if (weight := chosen.get((task, method))) is not None:
                settings = {"stage": "test", "task": task, "method": method, "weight": weight}
                wanted += [{**settings, "seed": seed} for seed in SEEDS]
    return wanted


def weights(rows: list[Row]) -> dict[tuple[str, str], float]:
    """Return the weights that were chosen, by task and method."""
    return {(r["task"], r["method"]): r["kl_weight"] for r in rows if r["stage"] == "tune"}


def run(settings: Settings, data_dir: str | None) -> Row:
    """Choose the KL weight, or train at the chosen one and score as the example does."""
    quickstart, name, seed = example(), settings["task"], settings["seed"]
    task, method = quickstart.TASKS[name](seed), quickstart.METHODS[settings["method"]]
    train = partial(quickstart.train, method, task)
    if settings["stage"] == "test":
        return {
            k: float(v) for k, v in quickstart.score(name, task, method, *train(settings["weight"])).items()
        }

    def score(model: Any, guide: Any, validation: Any) -> float:
        return float(dvi.predict(model, guide, validation, method.rule, seed=seed).metrics()["nll"])

    tuned = dvi.tune(
        train,
        task.validation,
        {"kl_weight": START},
        score=score,
        max_trainings=MAX_TRAININGS,
        seed=seed,
        progress=False,
    )
    tried, scores = tuned.table["kl_weight"], tuned.table["score"]
    return {**tuned.settings, "tried": tried, "scores": scores}


COLUMNS = {
    "digits": ("digits nll", "digits accuracy", "digits ece", "digits auroc"),
    "curve": ("curve nll", "curve sd data", "curve sd gap"),
}
HEADERS = {
    "digits": ["method", "KL weight", "NLL", "NLL minus MAP's", "accuracy", "ECE", "AUROC, shuffled pixels"],
    "curve": ["method", "KL weight", "NLL", "NLL minus MAP's", "sd on the data", "sd in the gap"],
}


def report(rows: list[Row], folder: Path) -> str:
    """Write a table for each task."""
    chosen = weights(rows)
    text = []
    for task in ("digits", "curve"):
        of_task = {
            method: sorted(
                (r for r in rows if r["stage"] == "test" and (r["task"], r["method"]) == (task, method)),
                key=lambda r: r["seed"],
            )
            for method in example().METHODS
        }
        lines = []
        for method, runs in of_task.items():
            if not runs:
                continue
            first, *others = COLUMNS[task]
            nll = [r[first] for r in runs]
            against = None if method == "MAP" else str(paired(nll, [r[first] for r in of_task["MAP"]]))
            cells = [f"{mean(r[column] for r in runs):.3f}" for column in others]
            lines.append([method, chosen[task, method], mean_sd(nll), against, *cells])
        text.append(f"**{task.capitalize()}**\n\n{table(HEADERS[task], lines)}")
    tail = "Mean ± standard deviation; differences paired by seed ± half the 95 % interval, bold where that lacks zero."
    return "\n".join([*text, f"{tail} {provenance('quickstart', rows)}", ""])


BENCHMARK = Benchmark("quickstart", "What does the quickstart show, over five seeds?", plan, run, report)
