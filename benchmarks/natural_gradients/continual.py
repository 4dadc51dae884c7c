# SPDX-License-Identifier: Apache-2.0
"""What is forgotten? The learners of examples/continual_learning.py on permuted digits and permuted MNIST.

The KL weight of VOGN and of VCL and the strength of EWC's penalty are chosen by the mean accuracy over all tasks after
the last on validation images, with a seed that is not among those of the table; where the smallest or largest that was
tried is the best, another one is tried beyond it. A learner that really sees its tasks once could not do that; it is
done alike for all. Everything else is the example's own.
"""

import os
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings, device
from benchmarks.shared.tables import mean_sd, paired, provenance, table

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import continual_learning as example  # noqa: E402

SEEDS, TUNING_SEED = (0, 1, 2), 100
LADDERS = {
    "VOGN": (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
    "VCL": (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
    "EWC": (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0),
}
MIDDLE = slice(2, 5)  # of a ladder, tried first


@dataclass(frozen=True)
class Course:
    """Tasks that learners meet one after the other.

    Attributes:
        setting: data and budget.
        num_tasks: how many.
        tuned_on: the course whose strengths are taken over; None if they are chosen on this one.
    """

    setting: example.Setting
    num_tasks: int = 5
    tuned_on: str | None = None


COURSES = {
    "digits": Course(example.DIGITS),
    "MNIST": Course(example.MNIST),
    "MNIST, 10 tasks": Course(example.MNIST, 10, "MNIST"),
    "MNIST, 10 tasks of 50,000": Course(replace(example.MNIST, num_train=50_000), 10),
}
SMALL = ("digits", "MNIST", "MNIST, 10 tasks")


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """Ask for courses by each strength on validation images, then for those of the table."""
    wanted: list[Settings] = []
    for data in COURSES if budget == "gpu" else SMALL:
        of = COURSES[data].tuned_on or data
        for learner in example.LEARNERS:
            tried = strengths_to_try(rows, of, learner)
            settings = [
                {
                    "data": of,
                    "learner": learner,
                    "strength": strength,
                    "seed": TUNING_SEED,
                    "part": "validation",
                }
                for strength in tried
            ]
            wanted += [one for one in settings if one not in wanted]
            strength = chosen(rows, of, learner)
            if strength is not None and set(tried) <= scores(rows, of, learner).keys():
                test = {"data": data, "learner": learner, "strength": strength, "part": "test"}
                wanted += [{**test, "seed": seed} for seed in SEEDS]
    return wanted


def strengths_to_try(rows: list[Row], data: str, learner: str) -> list[float]:
    """The middle of the ladder, and the next step while the best is at an end of what was tried."""
    ladder = LADDERS.get(learner, ())
    found = scores(rows, data, learner)
    tried = {strength for strength in ladder if strength in found} | set(ladder[MIDDLE])
    if tried <= found.keys() and tried:
        best, places = max(found, key=found.__getitem__), sorted(map(ladder.index, tried))
        if best == ladder[places[0]] and places[0]:
            tried.add(ladder[places[0] - 1])
        if best == ladder[places[-1]] and places[-1] + 1 < len(ladder):
            tried.add(ladder[places[-1] + 1])
    return sorted(tried)


def scores(rows: list[Row], data: str, learner: str) -> dict[float, float]:
    """Mean accuracy over all validation images after the last task, by strength."""
    found = [
        row for row in rows if (row["data"], row["learner"], row["part"]) == (data, learner, "validation")
    ]
    return {row["strength"]: float(np.mean(row["accuracies"][-1])) for row in found}


def chosen(rows: list[Row], data: str, learner: str) -> float | None:
    """The best strength; 0 for learners that have none, None if nothing is known."""
    if learner not in LADDERS:
        return 0.0
    found = scores(rows, data, learner)
    return max(found, key=found.__getitem__) if found else None


@cache
def tasks_of(data: str, seed: int, data_dir: str | None) -> list[example.Task]:
    """The tasks of a seed: its images, its orders of pixels."""
    folder = None if data == "digits" else Path(data_dir or os.environ.get("PYRO_DVI_DATA", "data"))
    images = example.load_images(folder, COURSES[data].setting.num_train, seed)
    return example.permuted(images, COURSES[data].num_tasks, seed)


def run(settings: Settings, data_dir: str | None) -> Row:
    """Let a learner meet all tasks."""
    data, seed = settings["data"], settings["seed"]
    tasks, where = tasks_of(data, seed, data_dir), str(device())
    learner, strength = settings["learner"], settings["strength"]
    accuracies = example.course(
        learner, strength, COURSES[data].setting, tasks, seed, where, settings["part"]
    )
    return {"accuracies": [row[: t + 1] for t, row in enumerate(accuracies.round(4).tolist())]}


def matrix(row: Row) -> np.ndarray:
    """Accuracies ``[tasks, tasks]`` of a course, NaN for tasks not met yet."""
    lines = row["accuracies"]
    return np.array([line + [np.nan] * (len(lines) - len(line)) for line in lines])


def tested(rows: list[Row], data: str) -> dict[str, list[Row]]:
    """By learner, the courses with the chosen strength, in the order of their seeds; only learners that have all."""
    found = {}
    for learner in example.LEARNERS:
        strength = chosen(rows, COURSES[data].tuned_on or data, learner)
        key = {"data": data, "learner": learner, "part": "test", "strength": strength}
        own = sorted((row for row in rows if key.items() <= row.items()), key=lambda row: row["seed"])
        if {row["seed"] for row in own} == set(SEEDS):
            found[learner] = own
    return found


DEFINITIONS = f"""\
Accuracies in %, mean ± standard deviation over {len(SEEDS)} seeds, each with its own training images, pixel
permutations, weights and batches. *Own*: accuracy on each task directly after learning it, averaged over tasks.
*Final*: mean accuracy on all tasks after the last; *first* and *last*: accuracy on the first and the last task then.
*Forgotten*: mean accuracy lost on the earlier tasks since they were learned. *VOGN minus*: VOGN's final accuracy minus
the learner's, paired by seed, ± half the 95 % interval; bold if it excludes zero.

Strength: KL weight (VOGN, VCL) or weight of the Fisher information (EWC), chosen by the final mean accuracy on
validation images with another seed."""


def report(rows: list[Row], folder: Path) -> str:
    """A table for each course, and one plot."""
    found = {data: tested(rows, data) for data in COURSES}
    found = {data: learners for data, learners in found.items() if learners}
    parts = [provenance("continual_learning", rows), DEFINITIONS]
    if found:
        size = (10, 4.1 * len(found))
        figure, axes = plt.subplots(len(found), 2, figsize=size, layout="constrained", squeeze=False)
        for (data, learners), pair in zip(found.items(), axes, strict=True):
            results = {name: np.stack([matrix(row) for row in own]) for name, own in learners.items()}
            setting = COURSES[data].setting
            budget = setting.budget
            parts += [
                f"### Permuted {data}: {COURSES[data].num_tasks} tasks of {setting.num_train} images, two hidden "
                f"layers of {setting.hidden} units, {budget.epochs} epochs of batches of {budget.batch_size}",
                table(HEADER, [line(name, results, learners[name]) for name in results]),
                tuning(rows, data),
            ]
            example.draw(pair, results, f"permuted {data}")
        figure.savefig(folder / "continual_learning.png", dpi=110)
        plt.close(figure)
    return "\n\n".join(part.rstrip("\n") for part in parts if part)


HEADER = ["learner", "strength", "own", "final", "first", "last", "forgotten", "VOGN minus"]


def line(name: str, results: dict[str, np.ndarray], own_rows: list[Row]) -> list[Any]:
    """One learner's line."""
    accuracies = 100 * results[name]
    number = accuracies.shape[1]
    final = accuracies[:, -1]
    own = accuracies[:, range(number), range(number)]
    columns = [own.mean(1), final.mean(1), final[:, 0], final[:, -1], (own - final)[:, :-1].mean(1)]
    strength = own_rows[0]["strength"]
    ours = results.get("VOGN")
    difference = None if name == "VOGN" or ours is None else paired(100 * ours[:, -1].mean(1), final.mean(1))
    return [name, f"{strength:g}" if strength else None, *(mean_sd(list(c), 1) for c in columns), difference]


def tuning(rows: list[Row], data: str) -> str:
    """What the choice of strengths was made from."""
    if COURSES[data].tuned_on:
        return f"The strengths were chosen on {COURSES[data].tuned_on}."
    shown = [
        f"{name}: "
        + ", ".join(f"{strength:g} → {100 * score:.1f}" for strength, score in sorted(found.items()))
        for name in LADDERS
        if (found := scores(rows, data, name))
    ]
    return "Final mean accuracy on validation images for each strength. " + "; ".join(shown) + "."


BENCHMARK = Benchmark(
    "continual_learning",
    "How much do VOGN, VCL and EWC forget on permuted digits and permuted MNIST?",
    plan,
    run,
    report,
)
