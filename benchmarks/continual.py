# SPDX-License-Identifier: Apache-2.0
"""What is forgotten? The learners of examples/continual_learning.py on permuted digits and permuted MNIST.

The KL weight of VOGN and of VCL and the strength of EWC's penalty are chosen from equally many values, by the mean
accuracy over all tasks after the last on validation images, with a seed that is not among those of the table. A learner
that really sees its tasks once could not do that; it is done alike for all. Everything else is the example's own.

    python benchmarks/continual.py --data-dir DIR            # both data sets, a quarter of an hour on one core
    python benchmarks/continual.py --data digits             # needs no data
    python benchmarks/continual.py --report                  # only rewrite table and plot from the results

Each finished course is a line of results/continual_learning.jsonl; courses that are already there are not repeated.
"""

import argparse
import json
import os
import platform
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import continual_learning as example  # noqa: E402

RESULTS = Path(__file__).parent / "results"
LINES = RESULTS / "continual_learning.jsonl"
SETTINGS = {setting.name: setting for setting in (example.DIGITS, example.MNIST)}
SEEDS, TUNING_SEED = (0, 1, 2), 100
NUM_TASKS = 5
# As many for each learner; where the best is at the edge, the report shows it.
GRIDS = {
    "digits": {
        "VOGN": (0.003, 0.03, 0.1, 0.3),
        "VCL": (0.003, 0.01, 0.03, 0.1),
        "EWC": (1.0, 3.0, 10.0, 30.0),
    },
    "MNIST": {"VOGN": (0.01, 0.03, 0.1), "VCL": (0.003, 0.01, 0.03), "EWC": (3.0, 10.0, 30.0)},
}


def stored() -> list[dict[str, Any]]:
    """All finished courses."""
    return [json.loads(line) for line in LINES.read_text().splitlines()] if LINES.exists() else []


@cache
def tasks_of(data: str, seed: int, data_dir: Path | None) -> list[example.Task]:
    """The tasks of a seed: its images, its orders of pixels."""
    folder = None if data == "digits" else data_dir
    images = example.load_images(folder, SETTINGS[data].num_train, seed)
    return example.permuted(images, NUM_TASKS, seed)


def run(
    data: str, learner: str, strength: float, seed: int, part: str, data_dir: Path | None
) -> dict[str, Any]:
    """Return a course, from the results if it is there."""
    key = {"data": data, "learner": learner, "strength": strength, "seed": seed, "part": part}
    for line in stored():
        if key.items() <= line.items():
            return line
    start = time.perf_counter()
    accuracies = example.course(
        learner, strength, SETTINGS[data], tasks_of(data, seed, data_dir), seed, "cpu", part
    )
    seconds = time.perf_counter() - start
    line = {**key, "seconds": round(seconds, 1), "accuracies": [row.tolist() for row in accuracies.round(4)]}
    line["accuracies"] = [row[: t + 1] for t, row in enumerate(line["accuracies"])]
    with LINES.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(
        data,
        learner,
        strength,
        seed,
        part,
        f"{np.mean(line['accuracies'][-1]):.3f}",
        f"{seconds:.0f} s",
        flush=True,
    )
    return line


def choose(data: str, learner: str, data_dir: Path | None) -> float:
    """Return the strength with the best validation accuracy over all tasks."""
    if learner not in GRIDS[data]:
        return 0.0
    tried = [run(data, learner, value, TUNING_SEED, "validation", data_dir) for value in GRIDS[data][learner]]
    return float(max(tried, key=lambda line: np.mean(line["accuracies"][-1]))["strength"])


def final(data: str, learner: str, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The courses of the table: one for each seed, with the strength that was chosen; none until all are there."""
    tried = [x for x in lines if (x["data"], x["learner"], x["part"]) == (data, learner, "validation")]
    best = max(tried, key=lambda x: np.mean(x["accuracies"][-1]))["strength"] if tried else 0.0
    found = [
        x
        for x in lines
        if (x["data"], x["learner"], x["part"], x["strength"]) == (data, learner, "test", best)
    ]
    return found if {x["seed"] for x in found} == set(SEEDS) else []


def matrix(line: dict[str, Any]) -> np.ndarray:
    """Accuracies ``[tasks, tasks]`` of a course, NaN for tasks not met yet."""
    rows = line["accuracies"]
    return np.array([row + [np.nan] * (len(rows) - len(row)) for row in rows])


def report(data_sets: list[str]) -> None:
    """Write table and plot."""
    lines = stored()
    figure, axes = plt.subplots(
        len(data_sets), 2, figsize=(10, 4.1 * len(data_sets)), layout="constrained", squeeze=False
    )
    parts = [
        "Written by `benchmarks/continual.py`, torch "
        f"{torch.__version__}, {platform.machine()}, CPU. Accuracies in %, mean ± standard deviation over "
        f"{len(SEEDS)} seeds, each with its own training images, orders of pixels, weights and batches. *Own*: on each "
        "task directly after learning it, averaged over tasks. *Final*: on all tasks after the last; *first* and "
        "*last* task among them. *Forgotten*: what was lost on the earlier tasks since they were learned.\n\n"
        "Strength: KL weight (VOGN, VCL) or weight of the information (EWC), chosen by the final mean accuracy on "
        "validation images with another seed. Where it is the first or last of those tried, another may do better."
    ]
    for data, pair in zip(data_sets, axes, strict=True):
        setting = SETTINGS[data]
        results, rows = {}, []
        for name in example.LEARNERS:
            found = final(data, name, lines)
            if not found:
                continue
            results[name] = np.stack([matrix(x) for x in found])
            rows.append(row_of(name, found, results[name]))
        budget = setting.budget
        parts.append(
            f"### Permuted {data}: {NUM_TASKS} tasks of {setting.num_train} images, two hidden layers of "
            f"{setting.hidden} units, {budget.epochs} epochs of batches of {budget.batch_size}"
        )
        header = "| learner | strength | own | final | first | last | forgotten |"
        parts.append("\n".join([header, "|---|---|---|---|---|---|---|", *rows]))
        parts.append(tuning_table(data, lines))
        example.draw(pair, results, f"permuted {data}")
    (RESULTS / "continual_learning.md").write_text("\n\n".join(parts) + "\n")
    figure.savefig(RESULTS / "continual_learning.png", dpi=110)
    plt.close(figure)


def row_of(name: str, found: list[dict[str, Any]], accuracies: np.ndarray) -> str:
    """One learner's line."""
    final = accuracies[:, -1]
    own = accuracies[:, range(NUM_TASKS), range(NUM_TASKS)]
    columns = [own.mean(1), final.mean(1), final[:, 0], final[:, -1], (own - final)[:, :-1].mean(1)]
    shown = " | ".join(f"{100 * c.mean():.1f} ± {100 * c.std(ddof=1):.1f}" for c in columns)
    strength = f"{found[0]['strength']:g}" if found[0]["strength"] else ""
    return f"| {name} | {strength} | {shown} |"


def tuning_table(data: str, lines: list[dict[str, Any]]) -> str:
    """What the choice of strengths was made from."""
    found = [line for line in lines if line["data"] == data and line["part"] == "validation"]
    shown = [
        f"{name}: "
        + ", ".join(
            f"{x['strength']:g} → {100 * np.mean(x['accuracies'][-1]):.1f}"
            for x in found
            if x["learner"] == name
        )
        for name in GRIDS[data]
        if any(x["learner"] == name for x in found)
    ]
    return "Final mean accuracy on validation images by strength. " + "; ".join(shown) + "."


def main() -> None:
    """Run what is missing, and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("PYRO_DVI_DATA", "data"))
    parser.add_argument("--learners", nargs="+", choices=example.LEARNERS, default=list(example.LEARNERS))
    parser.add_argument("--report", action="store_true", help="run nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.report:
        for data in options.data:
            for learner in options.learners:
                strength = choose(data, learner, options.data_dir)
                for seed in SEEDS:
                    run(data, learner, strength, seed, "test", options.data_dir)
    finished = [data for data in SETTINGS if any(final(data, name, stored()) for name in example.LEARNERS)]
    if not finished:
        raise SystemExit("no learner has finished all its seeds yet")
    report(finished)


if __name__ == "__main__":
    main()
