# SPDX-License-Identifier: Apache-2.0
"""Tables and figure of hfl_tasks.py, from its result lines."""

from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

Row = dict[str, Any]

BLUE, ORANGE, GREY = "#0072B2", "#E69F00", "#555555"
PANELS = (
    "dense Hessian",
    "dense GGN",
    "HFL pointwise",
    "64 posterior samples, GGN",
    "HFL sum",
    "HFL in-sample",
)


def tables(rows: list[Row], machine: str) -> str:
    """Return the Markdown page."""
    seeds = sorted({row["seed"] for row in rows})
    parts = [
        f"Written by `hfl_tasks.py`; seeds {', '.join(map(str, seeds))}; float64 unless stated; {machine}.",
        "Settings: N = 100, noise 0.1 (known), 50 tanh units (D = 151), standard normal priors; 100 test points. The "
        "work is in gradients of all data; the product of the Hessian with a vector counts 2. The machine did other "
        "work at the time, so that seconds are rough and the work is the measure.",
        "## Errors and work",
        "Relative error of the variance against the dense Hessian: the median and the largest over all points, seeds "
        "and tasks.",
        _errors(rows),
        "## HFL pointwise by task",
        _by_task(rows),
        *[
            f"No result: {r['what']}, {r['task']}, seed {r['seed']}: {r['error']}"
            for r in rows
            if r["kind"] == "failure"
        ],
        "## Scores",
        "Means over seeds, of the 95 % interval (PICP), CRPS and NLL with noise; in distribution / out of "
        "distribution. The pre-trained modes of HFL give negative numbers at some points, which no score can use: "
        "these points are left out of their rows, and their share is given.",
        *[
            f"**{task}**\n\n{_scores([r for r in rows if r['task'] == task])}"
            for task in _names(rows, "task")
        ],
        "## A mode that Adam left",
        "Before `polish`: negative eigenvalues of the Hessian, and what `fit` with `HessianFree()` and a query say; "
        "`Accept()` switches the check of the mode off.",
        _refusals(rows),
        "## Work",
        _work(rows),
        "![Bands](hfl_tasks.png)",
        "Bands of two standard deviations of the function (without noise), seed 0; grey where a mode of HFL gives a "
        "negative number in the place of a variance.",
    ]
    return "\n\n".join(parts) + "\n"


def _names(rows: list[Row], key: str) -> list[str]:
    return list(dict.fromkeys(row[key] for row in rows if key in row))


def _table(head: list[str], lines: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *lines])


def _of(rows: list[Row], method: str) -> list[Row]:
    return [row for row in rows if row.get("method") == method]


def _errors(rows: list[Row]) -> str:
    lines = []
    for method in _names(rows, "method"):
        found = _of(rows, method)
        per_point = mean(r["evaluations"] / r["points"] for r in found)
        lines.append(
            [
                method,
                f"{median(r['error_median'] for r in found):.2g}",
                f"{max(r['error_max'] for r in found):.2g}",
                f"{median(r['error_median_ggn'] for r in found):.2g}"
                if "error_median_ggn" in found[0]
                else "",
                f"{mean(r['negative'] for r in found):.0%}",
                f"{mean(r['evaluations'] for r in found):.0f}",
                f"{per_point:.1f}",
                f"{mean(r['seconds'] for r in found):.1f}",
                str(sum(r["points"] for r in found)),
            ]
        )
    head = [
        "method",
        "median error",
        "largest",
        "median error against the GGN",
        "negative",
        "work",
        "per point",
    ]
    return _table([*head, "seconds", "points in all"], lines)


def _by_task(rows: list[Row]) -> str:
    lines = []
    for task in _names(rows, "task"):
        cells = [task]
        for method in ("HFL pointwise", "HFL pointwise, float32", "conjugate gradients, Hessian"):
            found = [r for r in _of(rows, method) if r["task"] == task]
            cells.append(
                f"{median(r['error_median'] for r in found):.1e} / {max(r['error_max'] for r in found):.1e}"
                if found
                else "none"
            )
        lines.append(cells)
    return _table(["median / largest error", "HFL pointwise", "HFL pointwise, float32", "CG"], lines)


def _scores(rows: list[Row]) -> str:
    lines = []
    for method in _names(rows, "method"):
        found = _of(rows, method)
        if "picp_in" not in found[0]:
            continue
        cells = [method]
        for score in ("picp", "crps", "nll"):
            cells.append(f"{_mean(found, score + '_in')} / {_mean(found, score + '_ood')}")
        lines.append([*cells, f"{mean(r['negative'] for r in found):.0%}"])
    return _table(["method", "PICP", "CRPS", "NLL", "negative"], lines)


def _mean(rows: list[Row], key: str) -> str:
    values = [row[key] for row in rows if key in row]
    return f"{mean(values):.3f}" if values else "none"


def _refusals(rows: list[Row]) -> str:
    lines = [
        [
            row["task"],
            str(row["seed"]),
            str(row["negative_eigenvalues"]),
            _first_clause(row["by_default"]),
            _first_clause(row["when_accepted"]),
        ]
        for row in rows
        if row["kind"] == "training"
    ]
    return _table(["task", "seed", "negative eigenvalues", "by default", "with `Accept()`"], lines)


def _first_clause(text: str) -> str:
    return text.split(". ")[0].split(", which is not above")[0]


def _work(rows: list[Row]) -> str:
    pointwise = [r for r in rows if r.get("method") == "HFL pointwise"]
    kinds: list[tuple[str, Callable[[Row], bool]]] = [
        ("training by Adam", lambda r: r["kind"] == "training"),
        ("polish", lambda r: r["kind"] == "polish"),
        (f"HFL pointwise, {pointwise[0]['points']} points", lambda r: r.get("method") == "HFL pointwise"),
        (f"CG, {pointwise[0]['points']} points", lambda r: r.get("method") == "conjugate gradients, Hessian"),
    ]
    lines = []
    for name, matches in kinds:
        found = [r for r in rows if matches(r)]
        work = [r["evaluations"] for r in found]
        lines.append([name, f"{mean(work):.0f}", f"{max(work)}", f"{mean(r['seconds'] for r in found):.1f}"])
    return _table(["what", "gradients of all data, mean", "largest", "seconds, mean"], lines)


def figure(rows: list[Row], path: Path) -> None:
    """Draw the bands of one seed: tasks by methods."""
    tasks = _names([row for row in rows if row["kind"] == "picture"], "task")
    if not tasks:
        return
    fig, axes = plt.subplots(
        len(tasks),
        len(PANELS),
        figsize=(2.3 * len(PANELS), 1.9 * len(tasks)),
        sharex="row",
        sharey="row",
        squeeze=False,
    )
    for line, task in zip(axes, tasks, strict=True):
        own = [r for r in rows if r["task"] == task and r["seed"] == 0]
        picture = next(r for r in own if r["kind"] == "picture")
        x, centre = np.array(picture["x"]), np.array(picture["mean"])
        for ax, method in zip(line, PANELS, strict=True):
            variance = np.array(_of(own, method)[0]["band"])
            width = 2 * np.sqrt(np.where(variance < 0, np.nan, variance))
            ax.plot(picture["data_x"], picture["data_y"], ".", color=GREY, markersize=1.5, zorder=1)
            ax.fill_between(x, centre - width, centre + width, color=BLUE, alpha=0.35, linewidth=0)
            ax.plot(x, picture["truth"], color=ORANGE, linewidth=1.2, linestyle="--")
            ax.plot(x, centre, color=BLUE, linewidth=1.2)
            lowest, highest = min(picture["truth"]), max(picture["truth"])
            for start, stop in _runs(variance < 0):
                ax.axvspan(x[start], x[stop], color="0.85", zorder=0, linewidth=0)
            ax.set_ylim(lowest - 1.2, highest + 1.2)
            ax.tick_params(labelsize=7)
        line[0].set_ylabel(task, fontsize=8)
    for ax, method in zip(axes[0], PANELS, strict=True):
        ax.set_title(method, fontsize=8)
    axes[0, 0].plot([], [], color=ORANGE, linestyle="--", linewidth=1.2, label="truth")
    axes[0, 0].plot([], [], color=BLUE, linewidth=1.2, label="mode ± 2 sd")
    axes[0, 0].plot([], [], ".", color=GREY, markersize=3, label="data")
    axes[0, 0].legend(fontsize=6, loc="upper center", frameon=False)
    fig.tight_layout()
    fig.savefig(path, dpi=130)
    plt.close(fig)


def _runs(flags: Any) -> list[tuple[int, int]]:
    """First and last index of each run of true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(int), [0]])))
    return [(int(a), int(b) - 1) for a, b in zip(edges[::2], edges[1::2], strict=True)]
