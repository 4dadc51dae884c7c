# SPDX-License-Identifier: Apache-2.0
"""Which method predicts best, if all are tuned alike?

:mod:`benchmarks.shared.protocol` says how. The tasks, none of which has chosen a default or recipe of the library:

- 2,000 images of Fashion-MNIST, a convolutional network with batch normalisation, 400 and 1,600 steps, scored on test
  images 5,001 to 10,000; under shift these have noise of half their standard deviation.
- wine (UCI, the standard splits) with one learned scale of the noise; concrete with a noise that the network predicts.
- 600 of scikit-learn's digits under heavy noise; under shift with half as much more.
- 2,000 images of CIFAR-10 and LeNet-5.
- On a GPU: 19,000 images of CIFAR-10 and a ResNet-18 with pre-activation, 60 epochs.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean, median

import torch
from torch import nn

from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings
from benchmarks.shared.networks import conv_net, lenet, mlp, preact_resnet18
from benchmarks.shared.protocol import CONTESTANTS, tested, tuned
from benchmarks.shared.regressions import hold_out, standard_split
from benchmarks.shared.runner import is_among
from benchmarks.shared.tables import mean_sd, paired, provenance, table
from benchmarks.shared.tasks import Data, Task, images, noisy_digits, regression_of
from pyro_dvi.bayesian import Heteroscedastic

TUNING_SEED, SEEDS = 100, (0, 1, 2, 3, 4)


def _unseen(name: str, num_train: int, outside: tuple[str, ...], seed: int, data_dir: str | None) -> Data:
    """Images whose second half of the test set is scored, also under noise."""
    data = images(name, num_train, outside, seed, data_dir, num_test=10_000)
    half = len(data.test[0]) // 2
    data.test = data.test[0][half:], data.test[1][half:]
    noise = torch.randn(data.test[0].shape, generator=torch.Generator().manual_seed(0))
    data.shifted = data.test[0] + 0.5 * noise.to(data.test[0]), data.test[1]
    return data


def _split(name: str, seed: int, data_dir: str | None) -> Data:
    """One of the standard splits; a tenth of its training rows is for validation."""
    rest, test = standard_split(name, seed % 20, data_dir)
    return regression_of(name, (*hold_out(rest, 10, 0, seed), test), data_dir)


def _images(
    network: Callable[[], nn.Sequential],
    name: str,
    outside: tuple[str, ...],
    epochs: int,
    num_train: int = 2000,
) -> Task:
    return Task(network, partial(_unseen, name, num_train, outside), (), epochs, 100, 0.0)


_FASHION = partial(_images, conv_net, "FashionMNIST", ("MNIST", "notMNIST"))
TASKS = {
    "noisy digits": Task(lambda: mlp((64, 100, 10)), noisy_digits, (), 60, 100, 0.0),
    "wine": Task(lambda: mlp((11, 50, 1)), partial(_split, "wine-quality-red"), (), 30, 50, 0.0, False),
    "concrete, predicted noise": Task(
        lambda: mlp((8, 50, 2)), partial(_split, "concrete"), (), 60, 50, 0.0, False, Heteroscedastic()
    ),
    "Fashion-MNIST": _FASHION(20),
    "Fashion-MNIST, four times as long": _FASHION(80),
    "CIFAR-10": _images(partial(lenet, channels=3, padding=0), "CIFAR10", ("noise",), 20),
}
GPU_TASKS = {"CIFAR-10, PreActResNet-18": _images(preact_resnet18, "CIFAR10", ("noise",), 60, 19_000)}


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """Task by task, first tune each method, then train it with every seed at the settings that were chosen."""
    wanted: list[Settings] = []
    for task in TASKS if budget == "small" else GPU_TASKS:
        if not all(is_among(settings, rows) for settings in wanted):
            break
        tuned_rows = (row for row in rows if (row["task"], row["stage"]) == (task, "tune"))
        chosen = {row["method"]: row["chosen"] for row in tuned_rows}
        for method, contestant in CONTESTANTS.items():
            if contestant.like is None:
                wanted.append({"stage": "tune", "task": task, "method": method, "seed": TUNING_SEED})
            settings = chosen.get(contestant.like or method)
            if settings is not None:
                test = {"stage": "test", "task": task, "method": method, **settings}
                wanted += [{**test, "seed": seed} for seed in SEEDS]
    return wanted


def run(settings: Settings, data_dir: str | None) -> Row:
    """Tune a method, or train it at the chosen settings and score the test data."""
    about = dict(settings)
    stage, seed = about.pop("stage"), about.pop("seed")
    task, contestant = (TASKS | GPU_TASKS)[about.pop("task")], CONTESTANTS[about.pop("method")]
    if stage == "tune":
        return tuned(task, contestant, seed, data_dir)
    return tested(task, contestant, task.data(seed, data_dir), about)


def report(rows: list[Row], folder: Path) -> str:
    """A summary of all tasks, then a table for each."""
    tests = [row for row in rows if "last" in row]
    tasks = [task for task in TASKS | GPU_TASKS if any(row["task"] == task for row in tests)]
    text = [provenance("ranking", rows), _summary(tests, tasks)]
    for task in tasks:
        of_task = [row for row in rows if row["task"] == task]
        text += [f"### {task[0].upper()}{task[1:]}", _scores(of_task), _failed(of_task), _settings(of_task)]
    return "\n\n".join(filter(None, text))


def _summary(tests: list[Row], tasks: list[str]) -> str:
    """Differences of the test NLL from MAP's, at the last epoch."""
    lines = []
    for name, read in _LINES.items():
        cells = [
            _difference(_by_seed(tests, task, name, read), _by_seed(tests, task, "MAP")) for task in tasks
        ]
        lines.append([name, *cells])
    return table(["NLL minus MAP's", *tasks], [line for line in lines if any(line[1:])]).rstrip()


def _scores(rows: list[Row]) -> str:
    """Scores of a task; the best epoch by early stopping beside the last one."""
    tests = [row for row in rows if "last" in row]
    names = [name for name in tests[0]["last"] if name != "nll" and not name.startswith("scaled")]
    point, costs, lines = _by_seed(tests, tests[0]["task"], "MAP"), _costs(tests), []
    ends = {row["method"] for row in rows if row["stage"] == "tune" and _at_ends(row)}
    for name, read in _LINES.items():
        nll = _by_seed(tests, tests[0]["task"], name, read)
        if not nll:
            continue
        own = [row for row in tests if row["method"] == read.method]
        stopped = [row["best"][read.score] for row in own if "best" in row]
        others = [_mean([row["last"].get(read.others.get(n, n)) for row in own]) for n in names]
        cells = [mean_sd(list(nll.values())), _difference(nll, point), mean_sd(stopped) if stopped else None]
        tuned_as = CONTESTANTS[read.method].like or read.method
        lines.append(
            [name + " (setting at an end)" * (tuned_as in ends), *cells, *others, f"{costs[read.method]:.1f}"]
        )
    header = [
        "method",
        "NLL",
        "NLL minus MAP's",
        "NLL, early stopping",
        *map(_title, names),
        "training time, × MAP's",
    ]
    return table(header, lines).rstrip()


def _title(name: str) -> str:
    """Return the name of a score as it is written, such as ECE."""
    words = {"coverage_95": "95 % coverage", "brier": "Brier", "auroc": "AUROC,"}
    return " ".join(
        words.get(word, word.upper() if word in ("ece", "rmse", "nll,") else word) for word in name.split()
    )


def _at_ends(row: Row) -> list[str]:
    """Settings whose chosen value is the smallest or largest of those tried."""
    return [n for n, value in row["chosen"].items() if value in (min(row["tried"][n]), max(row["tried"][n]))]


def _failed(rows: list[Row]) -> str:
    """Trainings that diverged, which are left out of the means."""
    failed = [row["method"] for row in rows if "failed" in row]
    listed = ", ".join(f"{failed.count(name)} of {name}" for name in dict.fromkeys(failed))
    return f"Training runs that diverged and are excluded from the means: {listed}." if failed else ""


def _settings(rows: list[Row]) -> str:
    """What was chosen for each method, of what was tried; bold at an end."""
    lines = []
    for row in (row for row in rows if row["stage"] == "tune"):
        cells = []
        for name, value in row["chosen"].items():
            tried = sorted(set(row["tried"][name]))
            cell = f"{name} {value:g} (tried {', '.join(f'{other:g}' for other in tried)})"
            cells.append(f"**{cell} at an end**" if name in _at_ends(row) else cell)
        lines.append([row["method"], "; ".join(cells), len(row["tried"]["score"])])
    return table(["method", "chosen settings", "training runs"], lines).rstrip()


@dataclass(frozen=True)
class _Line:
    """Where the scores of a line are.

    Attributes:
        method: of the runs.
        score: the name of its NLL.
        others: names of further scores in the rows, where they differ.
    """

    method: str
    score: str = "nll"
    others: dict[str, str] = field(default_factory=dict)


_LINES: dict[str, _Line] = {}
for _name in CONTESTANTS:
    _LINES[_name] = _Line(_name)
    if _name == "MAP":
        others = dict.fromkeys(("accuracy", "brier", "nll, shifted"), "") | {"ece": "scaled ece"}
        _LINES["MAP, temperature scaling"] = _Line("MAP", "scaled nll", others)


def _by_seed(tests: list[Row], task: str, name: str, read: _Line | None = None) -> dict[int, float]:
    read = _LINES[name] if read is None else read
    found = (row for row in tests if (row["task"], row["method"]) == (task, read.method))
    return {row["seed"]: row["last"][read.score] for row in found if read.score in row["last"]}


def _difference(ours: dict[int, float], theirs: dict[int, float]) -> str | None:
    common = sorted(ours.keys() & theirs.keys())
    if not common or ours == theirs:
        return None
    return str(paired([ours[seed] for seed in common], [theirs[seed] for seed in common]))


def _costs(tests: list[Row]) -> dict[str, float]:
    """Seconds of a training over MAP's, the median over seeds."""
    seconds: dict[str, list[float]] = {}
    for row in tests:
        seconds.setdefault(row["method"], []).append(row["training_seconds"])
    return {method: median(values) / median(seconds["MAP"]) for method, values in seconds.items()}


def _mean(values: list[float | None]) -> str | None:
    known = [value for value in values if value is not None]
    return f"{mean(known):.3f}" if known else None


BENCHMARK = Benchmark("ranking", "Which method predicts best, with equal tuning?", plan, run, report)
