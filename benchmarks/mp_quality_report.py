# SPDX-License-Identifier: Apache-2.0
"""The tables of mp_quality.py, from its result lines."""

from collections.abc import Iterable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

Row = dict[str, Any]
SCORES = {"error": ("error, %", 100), "nll": ("NLL", 1), "ece": ("ECE, %", 100), "aumrc": ("AUMRC, %", 100)}
NETWORKS = {"digits": "MLP 64-50-50-10", "mnist": "LeNet-5"}

DEFINITIONS = """\
Scores of the test images; lower is better in all of them. NLL: mean negative log-likelihood in nats. ECE: 20 equally
wide bins of confidence. AUMRC: area under the misclassification-rejection curve (`pyro_dvi.metrics.aumrc`): the test
images are ranked by the entropy of their predicted class probabilities; k of n are rejected, the most uncertain
first, and the error is the misclassified share of the n - k others; the area is the mean over k = 0 ... n - 1; images
of equal entropy count as the mean of their errors; a curve of errors in % gives an area in %. ± is the standard
deviation over seeds, each with its own training and validation images, initial weights and batches; all seeds share
the test images.

Prediction: MNVI and MFVI by `Moments()` (one pass), the deterministic network at its weights, MC dropout by 20 random
masks, sampled VI by 20 draws of weights. Parameters: what the optimizer changes. Inference: `predict` on 1,000 images
relative to the deterministic network, median of interleaved rounds. All methods have He priors and Adam, whose step
size is ten times larger for posterior scales. The learning rate, the dropout rate and the KL weight are each chosen
in turn, the others held, by validation NLL with other seeds than those of the table; a grid of dropout rates or KL
weights grows while its edge is the best. The epoch is chosen in each run by its own validation images; where it is
the last, more training might have helped."""


def write_report(rows: list[Row], path: Path) -> None:
    """Write a section for each task and training size."""
    tests = [row for row in rows if row["stage"] == "test"]
    if not tests:
        return
    text = [
        f"Written by `benchmarks/mp_quality.py`, torch {tests[-1]['torch']}, {tests[-1]['machine']}.",
        "",
        DEFINITIONS,
    ]
    for task, size, epochs in dict.fromkeys((row["task"], row["num_train"], row["epochs"]) for row in tests):
        of_task = [row for row in rows if row["task"] == task and row.get("num_train") in (None, size)]
        of_task = [row for row in of_task if row.get("epochs") in (None, epochs)]
        text += section(of_task)
    path.write_text("\n".join(text) + "\n")


def section(rows: list[Row]) -> list[str]:
    """The table of one task, what was tried, and differences seed by seed."""
    tests = [row for row in rows if row["stage"] == "test"]
    first = tests[0]
    methods = list(dict.fromkeys(row["method"] for row in tests))
    methods.sort(key=["MNVI", "MFVI", "deterministic", "MC dropout", "sampled VI"].index)
    seconds = next((row["seconds"] for row in rows if row["stage"] == "timing"), {})
    headings = [heading for heading, _ in SCORES.values()]
    columns = [
        "method",
        *headings,
        "parameters",
        "inference",
        "learning rate",
        "KL weight",
        "dropout",
        "epochs",
    ]
    lines = [
        "",
        f"### {first['task']}: {NETWORKS[first['task']]}, {first['num_train']:,} training and "
        f"{first['num_test']:,} test images, {len({row['seed'] for row in tests})} seeds, "
        f"up to {first['epochs']} epochs",
        "",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
    ]
    for method in methods:
        chosen = of_method(tests, method)
        scores = [spread(factor * row[score] for row in chosen) for score, (_, factor) in SCORES.items()]
        ratio = f"{seconds[method] / seconds['deterministic']:.1f}" if seconds else ""
        row = chosen[0]
        cells = [method, *scores, f"{row['parameters']:,}", ratio]
        cells += [f"{row['lr']:g}", f"{row['kl_weight']:g}", f"{row['dropout']:g}" if row["dropout"] else ""]
        cells.append(", ".join(str(best_epoch(row)) for row in chosen))
        lines.append(f"| {' | '.join(cells)} |")
    if seconds:
        milliseconds = 1000 * seconds["deterministic"]
        lines += ["", f"The deterministic network took {milliseconds:.1f} ms for 1,000 images."]
    return lines + tried(rows, methods) + paired(tests, methods)


def of_method(tests: list[Row], method: str) -> list[Row]:
    """The rows of a method by seed, all of the same settings."""
    chosen = sorted((row for row in tests if row["method"] == method), key=lambda row: row["seed"])
    settings = {(row["lr"], row["kl_weight"], row["dropout"]) for row in chosen}
    if len(settings) > 1:
        raise ValueError(
            f"{method} has final runs of several settings, {settings}: remove the outdated lines"
        )
    return chosen


def best_epoch(row: Row) -> int:
    history = row["validation_nll"]
    return int(row["checkpoints"][history.index(min(history))])


def tried(rows: list[Row], methods: list[str]) -> list[str]:
    """Validation NLL of all settings, as found in tuning."""
    lines = [
        "",
        "Tuning: validation NLL at the best epoch by (learning rate, KL weight[, dropout]), "
        f"{len({row['seed'] for row in rows if row['stage'] == 'tune'})} seed(s):",
        "",
    ]
    for method in methods:
        found: dict[tuple, list[float]] = {}
        for row in rows:
            if row["stage"] == "tune" and row["method"] == method:
                key = (row["lr"], row["kl_weight"], *([row["dropout"]] if row["dropout"] else []))
                found.setdefault(key, []).append(min(row["validation_nll"]))
        cells = [f"({', '.join(f'{v:g}' for v in key)}) {mean(nll):.4f}" for key, nll in found.items()]
        lines.append(f"- {method}: {', '.join(cells)}")
    return lines


def paired(tests: list[Row], methods: list[str]) -> list[str]:
    """How much lower the scores of MNVI and MFVI are than those of their rivals, seed by seed."""
    columns = ["of", "below", *(heading for heading, _ in SCORES.values())]
    lines = ["", "How far a method is below another, mean over seeds (in how many seeds it is below):", ""]
    lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for ours in ("MNVI", "MFVI"):
        for theirs in methods:
            if ours not in methods or theirs in ("MNVI", "MFVI"):
                continue
            cells = [ours, theirs]
            for score, (_, factor) in SCORES.items():
                mine = {row["seed"]: row[score] for row in of_method(tests, ours)}
                gains = [
                    factor * (row[score] - mine[row["seed"]])
                    for row in of_method(tests, theirs)
                    if row["seed"] in mine
                ]
                wins = sum(gain > 0 for gain in gains)
                cells.append(f"{mean(gains):+.3f} ({wins} of {len(gains)})" if gains else "")
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def spread(values: Iterable[float]) -> str:
    values = list(values)
    return f"{mean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")
