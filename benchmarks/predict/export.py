# SPDX-License-Identifier: Apache-2.0
"""How many runs of the model, and how long, do an export and predictions take? Beside ``pyro.infer.Predictive``.

All contestants draw the weights of a small network equally often: ``to_arviz`` keeps a draw of every observation for
each, with its log density; ``Predictive`` the draws of observations alone; ``predict`` averages. They take turns, and
medians over rounds are reported.
"""

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from pyro.infer import Predictive
from torch import Tensor, nn

from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings, device
from benchmarks.shared.tables import provenance, table
from pyro_dvi import MeanFieldGuide, Samples, predict, regressor, to_arviz, to_bayesian_

WIDTH, ROUNDS = 50, 5


def contestants(
    model: Callable[..., Any], guide: MeanFieldGuide, x: Tensor, y: Tensor, count: int
) -> dict[str, Callable[[], Any]]:
    """Return what takes turns."""
    rule = Samples(count)

    def looped() -> Any:
        return Predictive(model, guide=guide, num_samples=count, return_sites=["obs"])(x)

    return {
        "to_arviz": lambda: to_arviz(model, guide, (x, y), method=rule, seed=0),
        "to_arviz, prior=n": lambda: to_arviz(model, guide, (x, y), method=rule, prior=count, seed=0),
        "predict": lambda: predict(model, guide, (x, y), rule, seed=0),
        "predict, keep_draws=True": lambda: predict(model, guide, (x, y), rule, seed=0, keep_draws=True),
        "Predictive": looped,
    }


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """One comparison; larger on a GPU."""
    return [{"num_samples": 500, "num_rows": 2000 if budget == "small" else 100_000}]


def run(settings: Settings, data_dir: str | None) -> Row:
    """Count runs of the model and time each contestant."""
    x, y = torch.randn(settings["num_rows"], 13), torch.randn(settings["num_rows"])
    x, y = x.to(device()), y.to(device())
    net = nn.Sequential(nn.Linear(13, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)).to(device())
    module = regressor(to_bayesian_(net), num_data=len(x), noise_scale=0.5).eval()
    guide = MeanFieldGuide(module)
    guide(x, y)

    called: list[None] = []  # not kept in the module: a model that keeps something runs once for each draw

    def model(x: Tensor, y: Tensor | None = None) -> None:
        called.append(None)
        module(x, y)

    runs: dict[str, int] = {}
    seconds: dict[str, list[float]] = {}
    for number in range(ROUNDS + 1):  # the first loads what is loaded once
        for name, contestant in contestants(model, guide, x, y, settings["num_samples"]).items():
            called.clear()
            start = time.perf_counter()
            with torch.no_grad():
                contestant()
            if number > 0:
                seconds.setdefault(name, []).append(time.perf_counter() - start)
            runs[name] = len(called)
    return {"runs": runs, "seconds": {name: median(values) for name, values in seconds.items()}}


def report(rows: list[Row], folder: Path) -> str:
    """A table for each size."""
    parts = [f"{provenance('export_speed', rows)} Seconds are medians of {ROUNDS} rounds."]
    for row in rows:
        lines = [[name, row["runs"][name], f"{seconds:.3f}"] for name, seconds in row["seconds"].items()]
        parts.append(f"{row['num_samples']} posterior samples, {row['num_rows']} rows:")
        parts.append(table(["call", "runs of the model", "seconds"], lines).rstrip())
    return "\n\n".join(parts)


BENCHMARK = Benchmark(
    "export_speed",
    "How many model runs and how much time does an export take, compared with predictions and Predictive?",
    plan,
    run,
    report,
    timed=True,
)
