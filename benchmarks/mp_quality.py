# SPDX-License-Identifier: Apache-2.0
"""How good are the predictions of moment propagation? Five methods on digits and MNIST, tuned alike.

MNVI (MultiplicativeNoiseGuide + MomentPropagationELBO), MFVI (MeanFieldGuide + MomentPropagationELBO), the
deterministic network (AutoDelta + Trace_ELBO, a MAP estimate), MC dropout and sampled VI (AutoNormal + Trace_ELBO)
train the same network with ReLU from the same priors and by the same optimizer. Learning rate, dropout rate and KL
weight are chosen one after the other, and the stopping epoch in each run, by NLL on validation images, with other
seeds than those of the final runs. Test images are looked at once in each final run. Inference is timed in one
interleaved run.

    python benchmarks/mp_quality.py --data-dir DIR                   # digits, and LeNet on 5,000 images of MNIST
    python benchmarks/mp_quality.py --tasks digits                   # some minutes, needs no data
    python benchmarks/mp_quality.py --tasks mnist --train-size 55000 --validation-size 5000 --test-size 10000 \
        --epochs 30 --data-dir DIR                                   # all of MNIST: hours on a CPU
    python benchmarks/mp_quality.py --report                         # only rewrite the table from the results

Each finished run is a line of results/mp_quality.jsonl; runs that are already there are not repeated.
"""

import argparse
import copy
import json
import math
import platform
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pyro
import torch
from torch import nn

from benchmarks.mp_methods import METHODS, Settings, num_parameters
from benchmarks.shared.images import ImageSplit, digits_split, load_split
from benchmarks.shared.networks import lenet, mlp
from pyro_dvi import metrics
from pyro_dvi.predictive import predict

RESULTS = Path(__file__).parent / "results" / "mp_quality.jsonl"
ECE_BINS = 20
TIMING_ROUNDS = 9
START = Settings(lr=3e-3, kl_weight=0.01, dropout=0.1)
GRIDS: dict[str, tuple[float, ...]] = {
    "lr": (1e-3, 3e-3),
    "dropout": (0.05, 0.1, 0.2),  # of MC dropout only
    "kl_weight": (0.003, 0.01, 0.03, 0.1),
}

WIDER = {  # a grid grows into these while its edge is the best
    "lr": GRIDS["lr"],
    "dropout": (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5),
    "kl_weight": (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
}


@dataclass(frozen=True)
class Task:
    """A data set with its network; all of it takes part in the identity of a run but for the seeds."""

    name: str
    num_train: int
    num_validation: int
    num_test: int
    epochs: int
    checkpoints: int  # evenly spaced epochs at which training may be stopped
    batch_size: int
    tuning_seeds: tuple[int, ...]
    seeds: tuple[int, ...]

    def network(self) -> nn.Sequential:
        """The untrained network."""
        return mlp((64, 50, 50, 10), nn.ReLU) if self.name == "digits" else lenet(activation=nn.ReLU)

    def split(self, seed: int, data_dir: str | None) -> ImageSplit:
        """The data of a seed; test images are the same for all."""
        if self.name == "digits":
            return digits_split(self.num_train, self.num_validation, seed)
        return load_split("MNIST", self.num_train, self.num_validation, self.num_test, seed, data_dir)


TASKS = {
    "digits": Task("digits", 500, 300, 899, 60, 10, 50, tuning_seeds=(100,), seeds=(0, 1, 2, 3, 4)),
    "mnist": Task("mnist", 5000, 1000, 5000, 15, 5, 100, tuning_seeds=(100,), seeds=(0, 1, 2)),
}


@dataclass(frozen=True)
class Run:
    """One training run, as its line in the results says."""

    stage: str  # "tune" or "test"
    task: str
    num_train: int
    epochs: int
    method: str
    seed: int
    lr: float
    kl_weight: float
    dropout: float


class Bench:
    """Trains what is not in the results yet.

    Args:
        task: what to train on.
        data_dir: where MNIST is.
    """

    def __init__(self, task: Task, data_dir: str | None) -> None:
        self.task = task
        self.data_dir = data_dir
        self.split = cache(lambda seed: task.split(seed, data_dir))

    def all_runs(self, name: str) -> None:
        """Tune a method, then train it with every seed."""
        torch.set_num_threads(1)
        settings = self.tuned(name)
        for seed in self.task.seeds:
            self.result("test", name, settings, seed)

    def tuned(self, name: str) -> Settings:
        """Settings of the lowest validation NLL, found one after the other."""
        settings = replace(START, dropout=START.dropout if name == "MC dropout" else 0.0)
        for field, values in GRIDS.items():
            if field == "dropout" and name != "MC dropout":
                continue
            tried, more = [], list(values)
            while more:
                tried += more
                candidates = [replace(settings, **{field: value}) for value in tried]
                settings = min(candidates, key=lambda candidate: self.validation_nll(name, candidate))
                place = WIDER[field].index(getattr(settings, field))
                more = [value for value in WIDER[field][max(place - 1, 0) : place + 2] if value not in tried]
        return settings

    def validation_nll(self, name: str, settings: Settings) -> float:
        """Mean over the tuning seeds of the NLL at the best checkpoint."""
        rows = [self.result("tune", name, settings, seed) for seed in self.task.tuning_seeds]
        return statistics.mean(min(row["validation_nll"]) for row in rows)

    def result(self, stage: str, name: str, settings: Settings, seed: int) -> dict[str, Any]:
        """The line of a run, which is trained if there is none yet."""
        run = Run(
            stage, self.task.name, self.task.num_train, self.task.epochs, name, seed, **asdict(settings)
        )
        for row in read_results():
            if all(row.get(key) == value for key, value in asdict(run).items()):
                return row
        row = {**asdict(run), **self.train(run, settings)}
        append(row)
        return row

    def train(self, run: Run, settings: Settings) -> dict[str, Any]:
        """Train, and return the validation NLL at the checkpoints; of final runs also the test scores of the best."""
        task, method, data = self.task, METHODS[run.method], self.split(run.seed)
        pyro.clear_param_store()
        torch.manual_seed(run.seed)
        model, guide, svi = method.build(task.network(), settings, task.num_train)
        order = torch.Generator().manual_seed(run.seed)  # the same batches for all methods
        x, y = data.train
        epochs, history, best = [], [], {}
        for epoch in range(1, task.epochs + 1):
            for rows in torch.randperm(len(x), generator=order).split(task.batch_size):
                svi.step(x[rows], y[rows])
            if epoch % (task.epochs // task.checkpoints) == 0:
                scores = predict(model, guide, data.validation, method.rule, seed=run.seed).metrics()
                if scores["nll"] < min(history, default=math.inf):
                    best = copy.deepcopy(guide.state_dict())
                history.append(scores["nll"])
                epochs.append(epoch)
        row = {"checkpoints": epochs, "validation_nll": history, "parameters": num_parameters(guide)}
        if run.stage == "test":
            guide.load_state_dict(best)
            row |= test_scores(model, guide, data, run)
        return row

    @pyro.settings.context(module_local_params=True)  # guides of one class for several models
    def time_inference(self) -> None:
        """Time predictions of 1,000 images by all methods in turn, with untrained networks; append one line."""
        if any(row["stage"] == "timing" and row["task"] == self.task.name for row in read_results()):
            return
        torch.set_num_threads(1)
        torch.manual_seed(0)
        data = self.split(0)
        x = data.test[0]
        x = x.repeat(-(-1000 // len(x)), 1, 1, 1)[:1000]
        contestants: dict[str, Callable[[], Any]] = {}
        for name, method in METHODS.items():
            dropout = START.dropout if name == "MC dropout" else 0.0
            model, guide, _ = method.build(self.task.network(), replace(START, dropout=dropout), len(x))
            guide(data.train[0][:10], data.train[1][:10])  # sets it up
            contestants[name] = lambda m=model, g=guide, r=method.rule: predict(m, g, x, r).probabilities
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(TIMING_ROUNDS + 1):  # the first is thrown away
            for name, run in contestants.items():
                start = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - start)
        medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
        append({"stage": "timing", "task": self.task.name, "rounds": TIMING_ROUNDS, "seconds": medians})


def test_scores(model: Any, guide: Any, data: ImageSplit, run: Run) -> dict[str, float]:
    """Scores on the test images."""
    prediction = predict(model, guide, data.test, METHODS[run.method].rule, seed=run.seed)
    p, y = prediction.probabilities, data.test[1]
    return {
        "num_test": len(y),
        "error": 1 - metrics.accuracy(p, y),
        "nll": metrics.nll(prediction.log_likelihood()).value,
        "ece": metrics.expected_calibration_error(p, y, ECE_BINS),
        "aumrc": metrics.aumrc(p, y),
    }


def append(row: dict[str, Any]) -> None:
    line = json.dumps({**row, "torch": torch.__version__, "machine": f"{platform.machine()}, CPU, 1 thread"})
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as file:
        file.write(line + "\n")


def read_results() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", help="folder with MNIST/raw (else PYRO_DVI_DATA, else a download)")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--train-size", type=int, help="training images")
    parser.add_argument("--validation-size", type=int, help="validation images")
    parser.add_argument("--test-size", type=int, help="test images of MNIST")
    parser.add_argument("--epochs", type=int, help="a multiple of 10 for digits, of 5 for mnist")
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--jobs", type=int, default=2, help="processes, one thread and one method each")
    parser.add_argument("--report", action="store_true", help="only rewrite the table")
    options = parser.parse_args()
    if not options.report:
        changes = {
            "num_train": options.train_size,
            "num_validation": options.validation_size,
            "num_test": options.test_size,
            "epochs": options.epochs,
            "seeds": options.seeds,
        }
        changes = {field: value for field, value in changes.items() if value is not None}
        benches = [Bench(replace(TASKS[name], **changes), options.data_dir) for name in options.tasks]
        with ProcessPoolExecutor(options.jobs) as pool:
            jobs = [pool.submit(_all_runs, b.task, b.data_dir, m) for b in benches for m in options.methods]
            for job in jobs:
                job.result()
        for bench in benches:
            bench.time_inference()
    from benchmarks.mp_quality_report import write_report

    write_report(read_results(), RESULTS.with_suffix(".md"))


def _all_runs(task: Task, data_dir: str | None, method: str) -> None:
    Bench(task, data_dir).all_runs(method)


if __name__ == "__main__":
    main()
