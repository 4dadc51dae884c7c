# SPDX-License-Identifier: Apache-2.0
"""The table and the verdict of laplace_quality.py, from its result lines."""

import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

Row = dict[str, Any]
Groups = dict[tuple[str, str], dict[int, Row]]  # by method and tuning, then by seed
SCORES = ("nll", "ece", "accuracy", "auroc_noise", "auroc_permuted", "auroc_rotated")
NAMES = {"mlp": "64-100-10, rectified (D = 7,510)", "cnn": "two convolutions and a dense layer (D = 3,818)"}
OUR_FAST, REFERENCE, PEER_FULL = "PosteriorSamples(256)", "Dense", "laplace-torch full"
TIGHT = 1000  # times the precision of training

INTRODUCTION = """\
Written by `benchmarks/laplace_quality.py`, words and all. Scikit-learn's digits, shuffled by seed: 1,000 to train, 297
to validate, 500 to test. Networks trained to the mode under N(0, 1) priors; every method starts from the same weights.
The precision of the prior is one multiplier, tuned by evidence with the weights fixed, or by validation likelihood on
13 values from 0.01 to 10,000. Evidence is that of each method's own precision, here and there. Probit link for all.
AUROC: predictive entropy of the test digits against as many of uniform noise, permuted pixels, digits turned by 90
degrees. Mean over seeds ± standard deviation; the table has the number of seeds.

Seconds are *processor time of one thread* (fit and tune; prediction of 2,000 images). The machine was shared, so wall
time would say how busy it was; processor time suffers as well, if less, and small ratios mean little. Memory is the
growth of the peak of the process over what it held before; first uses of libraries are part of it and of the time.

laplace-torch runs with its own defaults, but for `prior_structure="scalar"`, and BackPACK as the backend of the
convolutional network, which is much faster there. Its full matrix takes a determinant in every step of tuning: it got
10 steps with rate 0.5 in place of its 100 with rate 0.1, so that its time is *a lower bound*.
"""


def write_report(results: Path) -> None:
    """Write the table beside the results."""
    rows = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    finished = [row for row in rows if "stopped_after" not in row]
    lines = [INTRODUCTION]
    for network in NAMES:
        of_network = [row for row in finished if row["network"] == network]
        stopped = [row for row in rows if row["network"] == network and "stopped_after" in row]
        if of_network:
            lines += [f"## {NAMES[network]}", "", *table(of_network), "", *verdict(of_network, stopped)]
    machines = ", ".join(sorted({row["machine"] for row in finished}))
    loads = [row["load"] for row in finished]
    if loads:
        lines.append(f"{machines}; load average {min(loads):.1f} to {max(loads):.1f} on two cores.")
    results.with_suffix(".md").write_text("\n".join(lines) + "\n")


def groups(rows: list[Row]) -> Groups:
    found: Groups = {}
    for row in rows:
        found.setdefault((row["method"], row["tuning"]), {})[row["seed"]] = row
    return found


def seconds(row: Row) -> float:
    total: float = sum(row["cpu_seconds"].values())
    return total


def table(rows: list[Row]) -> list[str]:
    """One line for each method and way of tuning."""
    lines = [
        "| method | tuned by | seeds | precision | NLL | ECE | accuracy | noise | permuted | rotated | fit + tune, s | "
        "predict, s | MiB |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (method, tuning), by_seed in sorted(groups(rows).items(), key=_order):
        found = list(by_seed.values())
        cells = [spread([row[score] for row in found]) for score in SCORES]
        precision = ", ".join(f"{row['precision']:.3g}" for row in found)
        times = [
            f"{mean([row['cpu_seconds'].get(phase, 0.0) for row in found]):.3g}"
            for phase in ("fit and tune", "predict")
        ]
        memory = f"{mean([row['memory_mib'] for row in found]):.0f}"
        lines.append(
            f"| {method} | {tuning} | {len(found)} | {precision} | {' | '.join(cells)} | {' | '.join(times)} | "
            f"{memory} |"
        )
    return lines


def _order(item: tuple[tuple[str, str], Any]) -> tuple[int, str, str]:
    (method, tuning), _ = item
    return (0 if method == "MAP" else 2 if method.startswith("laplace-torch") else 1, tuning, method)


def spread(values: list[float]) -> str:
    return f"{mean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def verdict(rows: list[Row], stopped: list[Row]) -> list[str]:
    """The targets and what else the rows say, each on the seeds that both sides have."""
    found = groups(rows)
    lines = [*_stopped(found, stopped), *_foreign(found, stopped)]
    for tuning in ("evidence", "validation"):
        lines += _mode(found, tuning)
    return [*lines, *_missing(found, stopped), ""]


def _stopped(found: Groups, stopped: list[Row]) -> list[str]:
    lines = []
    for row in stopped:
        line = (
            f"- {row['method']} by {row['tuning']}, seed {row['seed']}, was stopped after {row['stopped_after']:.0f} s "
            "of processor time, unfinished"
        )
        fast = found.get((OUR_FAST, row["tuning"]), {}).get(row["seed"])
        if fast is not None:
            line += (
                f": {row['stopped_after'] / seconds(fast):.0f} times the processor time of all of {OUR_FAST}"
            )
        lines.append(line + ".")
    return lines


def _foreign(found: Groups, stopped: list[Row]) -> list[str]:
    """How near the fast method comes to the full matrix: the peer's, and ours, which is the same matrix."""
    lines = []
    for other in (PEER_FULL, REFERENCE):
        fast, full = found.get((OUR_FAST, "evidence"), {}), found.get((other, "evidence"), {})
        seeds = sorted(fast.keys() & full.keys())
        if not seeds:
            continue
        worst = {
            score: max((fast[s][score] - full[s][score] for s in seeds), key=abs) for score in SCORES[3:]
        }
        differences = ", ".join(f"{score.removeprefix('auroc_')} {d:+.4f}" for score, d in worst.items())
        met = all(abs(d) <= 0.005 for d in worst.values())
        ratio = min(seconds(full[s]) / seconds(fast[s]) for s in seeds)
        target = f" (target: 50, **{'met' if ratio >= 50 else 'missed'}**)" if other == PEER_FULL else ""
        lines.append(
            f"- {OUR_FAST} against {other}, both by evidence, {len(seeds)} seed(s): largest difference of AUROC "
            f"{differences} (target: within 0.005, **{'met' if met else 'missed'}**); {other} takes at least "
            f"{ratio:.1f} times as long{target}."
        )
    return lines


def _mode(found: Groups, tuning: str) -> list[str]:
    """What is gained or lost against the mode itself."""
    point = found.get(("MAP", "none"), {})
    gains, tight = [], 0
    for (_, how), by_seed in found.items():
        seeds = by_seed.keys() & point.keys()
        if how == tuning and seeds:
            gains.append(mean(point[s]["nll"] - by_seed[s]["nll"] for s in seeds))
            tight += all(by_seed[s]["precision"] >= TIGHT for s in seeds)
    if not gains:
        return []
    better = sum(gain > 0 for gain in gains)
    said = f"- Tuned by {tuning}, {better} of {len(gains)} rows have a better NLL than the mode alone"
    if tight:
        said += f"; {tight} chose a precision of {TIGHT:,} or more, which leaves little but the mode"
    return [said + "."]


def _missing(found: Groups, stopped: list[Row]) -> list[str]:
    """Rows that a whole run would have."""
    methods = sorted({method for method, _ in found} | {OUR_FAST, REFERENCE})
    stopped_too = {(row["method"], row["tuning"]) for row in stopped} | {
        (PEER_FULL, "validation")
    }  # never run
    absent = [
        f"{method} by {tuning}"
        for tuning in ("evidence", "validation")
        for method in methods
        if method != "MAP" and (method, tuning) not in found and (method, tuning) not in stopped_too
    ]
    return [f"- Not run: {', '.join(absent)}."] if absent else []
