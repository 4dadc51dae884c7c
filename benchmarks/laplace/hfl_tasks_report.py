# SPDX-License-Identifier: Apache-2.0
"""Tables and figure of hfl_tasks.py."""

import re
from pathlib import Path
from statistics import mean, median
from textwrap import fill
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from benchmarks.shared.benchmark import Row
from benchmarks.shared.figures import COLOURS
from benchmarks.shared.tables import provenance, table

BLUE, ORANGE, *_ = COLOURS
GREY = "#555555"
POINTWISE, CG, SINGLE = "HFL pointwise", "conjugate gradients, Hessian", "HFL pointwise, float32"
PANELS = ("dense Hessian", "dense GGN", POINTWISE, "64 posterior samples, GGN", "HFL sum", "HFL in-sample")


def report(rows: list[Row], folder: Path) -> str:
    """Errors, scores, refusals, work and the figure of the bands."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure([row for row in rows if "picture" in row], folder / "hfl_tasks.png")
    failures = [
        f"No result: {SINGLE}, {row['task']}, seed {row['seed']}: {row['failure']}"
        for row in rows
        if "failure" in row
    ]
    parts = [
        f"{provenance('hfl_tasks', rows)} Float64 unless stated.",
        "Settings: N = 100, noise 0.1 (known), 50 tanh units (D = 151), standard normal priors; 100 test points. Work "
        "is measured in full-data gradients; a product of the Hessian with a vector counts as 2. The machine was "
        "shared, so seconds are only rough, and work is the better measure. HFL: Hessian-free Laplace.",
        "## Errors and work",
        "Relative error of the variance with respect to the dense Hessian: median and maximum over all points, seeds "
        "and tasks.",
        _errors(rows),
        "## HFL pointwise by task",
        _by_task(rows, tasks),
        *failures,
        "## Scores",
        "Means over seeds of the coverage of the 95 % interval (PICP), CRPS and NLL, all including the noise; in "
        "distribution / out of distribution. The pre-trained modes of HFL give negative variances at some points. "
        "These points are left out of their rows, and the last column gives their fraction.",
        *[f"**{task}**\n\n{_scores([r for r in rows if r['task'] == task])}" for task in tasks],
        "## A mode found by Adam alone",
        "Before `polish`: the number of negative eigenvalues of the Hessian, and the outcome of `fit` with "
        "`HessianFree()` and a query. `unconverged='accept'` turns off the check of the mode.",
        _refusals(rows),
        "## Work",
        _work(rows),
        "![Bands of two standard deviations of the function (without noise), seed 0; grey where a mode of HFL gives a "
        "negative variance](hfl_tasks.png)",
    ]
    return "\n\n".join(part.rstrip() for part in parts)


def _of(rows: list[Row], method: str) -> list[Row]:
    return [row["methods"][method] for row in rows if method in row["methods"]]


def _methods(rows: list[Row]) -> list[str]:
    """Those of all rows, of float32 last."""
    return sorted(
        dict.fromkeys(name for row in rows for name in row["methods"]), key=lambda name: name == SINGLE
    )


def _errors(rows: list[Row]) -> str:
    lines = []
    for method in _methods(rows):
        found = _of(rows, method)
        of_ggn = [r["error_median_ggn"] for r in found if "error_median_ggn" in r]
        lines.append(
            [
                method,
                f"{median(r['error_median'] for r in found):.2g}",
                f"{max(r['error_max'] for r in found):.2g}",
                f"{median(of_ggn):.2g}" if of_ggn else "",
                f"{mean(r['negative'] for r in found):.0%}",
                f"{mean(r['evaluations'] for r in found):.0f}",
                f"{mean(r['evaluations'] / r['points'] for r in found):.1f}",
                f"{mean(r['seconds'] for r in found):.1f}",
                sum(r["points"] for r in found),
            ]
        )
    header = "method, median error, largest error, median error to the GGN, negative, work, work per point, seconds, "
    return table((header + "total points").split(", "), lines)


def _by_task(rows: list[Row], tasks: list[str]) -> str:
    lines = []
    for task in tasks:
        cells = [task]
        for method in (POINTWISE, SINGLE, CG):
            found = _of([r for r in rows if r["task"] == task], method)
            worst = f"{max(r['error_max'] for r in found):.1e}" if found else ""
            cells.append(f"{median(r['error_median'] for r in found):.1e} / {worst}" if found else "none")
        lines.append(cells)
    return table(["median / largest error", POINTWISE, SINGLE, "CG"], lines)


def _scores(rows: list[Row]) -> str:
    lines = []
    for method in _methods(rows):
        found = _of(rows, method)
        if "picp_in" in found[0]:
            pairs = [
                f"{_mean(found, s + '_in')} / {_mean(found, s + '_ood')}" for s in ("picp", "crps", "nll")
            ]
            lines.append([method, *pairs, f"{mean(r['negative'] for r in found):.0%}"])
    return table(["method", "PICP", "CRPS", "NLL", "negative"], lines)


def _mean(rows: list[Row], key: str) -> str:
    values = [row[key] for row in rows if key in row]
    return f"{mean(values):.3f}" if values else "none"


def _refusals(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        said = row["training"]
        answers = [_in_short(said[key]) for key in ("by_default", "when_accepted")]
        lines.append([row["task"], row["seed"], said["negative_eigenvalues"], *answers])
    return table(["task", "seed", "negative eigenvalues", "by default", "with `unconverged='accept'`"], lines)


def _in_short(text: str) -> str:
    """Return the name of an error, with the curvature or the number of fits that it reports."""
    name, _, said = text.partition(": ")
    if found := re.search(r"d'd = (\S+),", said):
        return f"{name}: curvature {found[1]}"
    if found := re.search(r"did not find (\d+ of \d+) tilted minima", said):
        return f"{name}: {found[1]} minima not found"
    return name


def _work(rows: list[Row]) -> str:
    pointwise = _of(rows, POINTWISE)
    points = pointwise[0]["points"]
    kinds = {
        "training with Adam": [row["training"] for row in rows],
        "polish": [row["polish"] for row in rows],
        f"HFL pointwise, {points} points": pointwise,
        f"CG, {points} points": _of(rows, CG),
    }
    lines = []
    for name, found in kinds.items():
        work = [r["evaluations"] for r in found]
        lines.append([name, f"{mean(work):.0f}", max(work), f"{mean(r['seconds'] for r in found):.1f}"])
    return table(["", "full-data gradients, mean", "largest", "seconds, mean"], lines)


def figure(rows: list[Row], path: Path) -> None:
    """Draw the bands of one seed: methods by tasks."""
    if not rows:
        return
    fig, axes = plt.subplots(
        len(PANELS),
        len(rows),
        figsize=(2.3 * len(rows), 1.4 * len(PANELS)),
        sharex="col",
        sharey="col",
        squeeze=False,
        layout="constrained",
    )
    for column, row in zip(axes.T, rows, strict=True):
        picture = row["picture"]
        x, centre = np.array(picture["x"]), np.array(picture["mean"])
        for ax, method in zip(column, PANELS, strict=True):
            variance = np.array(row["methods"][method]["band"])
            width = 2 * np.sqrt(np.where(variance < 0, np.nan, variance))
            ax.plot(
                picture["data_x"], picture["data_y"], ".", color=GREY, markersize=1.5, zorder=1, label="data"
            )
            ax.fill_between(x, centre - width, centre + width, color=BLUE, alpha=0.35, linewidth=0)
            ax.plot(x, picture["truth"], color=ORANGE, linewidth=1.2, linestyle="--", label="truth")
            ax.plot(x, centre, color=BLUE, linewidth=1.2, label="mode ± 2 sd")
            lowest, highest = min(picture["truth"]), max(picture["truth"])
            for start, stop in _runs(variance < 0):
                ax.axvspan(x[start], x[stop], color="0.85", zorder=0, linewidth=0)
            ax.set_ylim(lowest - 1.2, highest + 1.2)
            ax.tick_params(labelsize=8)
        column[0].set_title(row["task"], fontsize=9)
    for ax, method in zip(axes[:, 0], PANELS, strict=True):
        ax.set_ylabel(fill(method, 15), fontsize=9)
    fig.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    fig.savefig(path, dpi=130)
    plt.close(fig)


def _runs(flags: Any) -> list[tuple[int, int]]:
    """First and last index of each run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(int), [0]])))
    return [(int(a), int(b) - 1) for a, b in zip(edges[::2], edges[1::2], strict=True)]
