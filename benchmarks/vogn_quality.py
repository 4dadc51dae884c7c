# SPDX-License-Identifier: Apache-2.0
"""How good are the predictions of VOGN with the library's defaults? Eight methods on seven tasks.

VOGN, OGN and IVON (NaturalGradientGuide + NaturalGradientELBO, optimizers without options), MAP (AutoDelta), mean-field
VI by sampled weights (AutoNormal, "BBB") and by sampled pre-activations, and MC dropout train the same network from the
same prior. The only thing tuned is the temperature: for VOGN, BBB and MAP from one list by NLL on validation data, and
the others take that of their relative among these three. Step sizes fall to zero over the epochs and the last weights
count; only "MAP, stopped early" goes back to its best epoch on validation data. At each temperature VOGN trains once
more for three times as long.

    python benchmarks/vogn_quality.py --data-dir DIR                        # everything, about an hour on one core
    python benchmarks/vogn_quality.py --tasks digits --methods MAP BBB VOGN # some minutes, needs no data
    python benchmarks/vogn_quality.py --report                              # only rewrite the tables from the results

Each finished run is a line of results/vogn_quality.jsonl; runs that are already there are not repeated.
"""

import argparse
import json
import platform
import time
from dataclasses import asdict, dataclass
from functools import cache
from math import exp
from pathlib import Path
from typing import Any

import pyro
import torch
from sklearn.metrics import roc_auc_score
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.shared.tasks import TASKS, Data, Task
from benchmarks.vogn_quality_methods import METHODS, Training
from benchmarks.vogn_quality_report import best_temperature, write_report
from pyro_dvi.predictive import PredictionRule, predict
from pyro_dvi.training import EarlyStopping, fit

RESULTS = Path(__file__).parent / "results" / "vogn_quality.jsonl"
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Run:
    """One training run, as its line in the results says."""

    task: str
    method: str
    seed: int
    temperature: float
    epochs: int


def train(run: Run, data: Data) -> dict[str, Any]:
    """Train one run and return its line."""
    task, method = TASKS[run.task], METHODS[run.method]
    pyro.clear_param_store()
    torch.manual_seed(run.seed)
    model = task.model(method.net(task.network()), len(data.train[0]))
    guide, svi = method.build(model, Training(run.temperature, task.adam_lr, run.epochs))
    order = torch.Generator().manual_seed(run.seed)  # the same batches for all methods
    loader = DataLoader(TensorDataset(*data.train), task.batch_size, shuffle=True, generator=order)

    def validation_nll() -> float:
        return predict(model, guide, data.validation, method.rules["mean"]).metrics()["nll"]

    stopping: dict[str, Any] = {}
    if method.stops_early:
        stopping = {"validate": validation_nll, "early_stopping": EarlyStopping(run.epochs)}
    fit(svi, loader, run.epochs, progress=False, **stopping)
    scores = {name: score(task, model, guide, data, rule, run.seed) for name, rule in method.rules.items()}
    return {**asdict(run), **scores}


def epoch_times(name: str, data: Data) -> dict[str, float]:
    """Seconds of the processor for an epoch of training by each method, after a first one."""
    task, seconds = TASKS[name], {}
    for method in METHODS:
        pyro.clear_param_store()
        model = task.model(METHODS[method].net(task.network()), len(data.train[0]))
        _, svi = METHODS[method].build(model, Training(0.1, task.adam_lr, 3))
        loader = DataLoader(TensorDataset(*data.train), task.batch_size, shuffle=True)
        history = fit(svi, loader, 1, progress=False)
        start = time.process_time()
        fit(svi, loader, 2, progress=False, history=history)
        seconds[method] = (time.process_time() - start) / 2
    return seconds


def score(
    task: Task, model: Any, guide: Any, data: Data, rule: PredictionRule, seed: int
) -> dict[str, float]:
    """Scores by one rule of prediction; of (1,000 of) the training data the accuracy or error only."""
    result = {}
    for part, pair in (("validation", data.validation), ("test", data.test)):
        prediction = predict(model, guide, pair, rule, seed=seed)
        scores = prediction.metrics()
        result[f"{part}_nll"] = scores["nll"] + data.log_unit
        if task.classes:
            result |= {f"{part}_{name}": scores[name] for name in ("accuracy", "ece")}
        else:
            result[f"{part}_rmse"] = scores["rmse"] * exp(data.log_unit)
    seen = tuple(part[:1000] for part in data.train)
    of_training = predict(model, guide, seen, rule, seed=seed).metrics()
    if task.classes:
        result["train_accuracy"] = of_training["accuracy"]
    else:
        result["train_rmse"] = of_training["rmse"] * exp(data.log_unit)
    if not data.outside:
        return result
    inside = prediction.entropy
    for name, x in data.outside.items():
        entropy = predict(model, guide, x, rule, seed=seed).entropy
        is_outside = torch.cat([torch.ones_like(entropy), torch.zeros_like(inside)])
        result[f"auroc {name}"] = float(roc_auc_score(is_outside, torch.cat([entropy, inside])))
    return result


class Bench:
    """The runs of one task that are not in the results yet.

    Args:
        name: of the task.
        seeds: of the runs.
        epochs: None for those of the task.
        data_dir: where the data are.
    """

    def __init__(self, name: str, seeds: list[int], epochs: int | None, data_dir: str | None) -> None:
        self.name, self.task, self.seeds = name, TASKS[name], seeds
        self.epochs = self.task.epochs if epochs is None else epochs
        self.data = cache(lambda seed: self.task.data(seed, data_dir))

    def all_runs(self, methods: list[str]) -> None:
        """Train the tuned methods at every temperature, then what takes its temperature from them."""
        tuned = [name for name in methods if METHODS[name].relative is None]
        for name in tuned:
            for temperature in self.task.temperatures:
                self.runs(name, temperature, self.epochs)
                if name == "VOGN":
                    self.runs(name, temperature, 3 * self.epochs)
        for name in methods:
            relative = METHODS[name].relative
            if relative is not None:
                self.runs(name, self.temperature_of(relative), self.epochs)

    def time(self) -> None:
        """Time an epoch of every method, unless that is done."""
        if not any(row["task"] == self.name for row in read_results() if "epoch_seconds" in row):
            append({"task": self.name, "epoch_seconds": epoch_times(self.name, self.data(0))})

    def temperature_of(self, name: str) -> float:
        """The best temperature of a tuned method, by the rule that it is meant to be predicted with."""
        rule = list(METHODS[name].rules)[-1]
        return best_temperature(read_results(), self.name, name, rule, self.epochs)

    def runs(self, method: str, temperature: float, epochs: int) -> None:
        """Train with every seed."""
        known = [{key: row.get(key) for key in asdict(Run("", "", 0, 0, 0))} for row in read_results()]
        for seed in self.seeds:
            run = Run(self.name, method, seed, temperature, epochs)
            if asdict(run) not in known:
                append(train(run, self.data(seed)))


def append(row: dict[str, Any]) -> None:
    line = {**row, "torch": torch.__version__, "machine": f"{platform.machine()} CPU, 1 thread"}
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as file:
        file.write(json.dumps(line) + "\n")


def read_results() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", help="folder with the data (else PYRO_DVI_DATA)")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--epochs", type=int, help="instead of each task's own")
    parser.add_argument("--time", action="store_true", help="also time an epoch of each method")
    parser.add_argument("--report", action="store_true", help="only rewrite the tables")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.report:
        for name in options.tasks:
            bench = Bench(name, options.seeds, options.epochs, options.data_dir)
            bench.all_runs(options.methods)
            if options.time:
                bench.time()
    write_report(read_results(), RESULTS.with_suffix(".md"))


if __name__ == "__main__":
    main()
