# SPDX-License-Identifier: Apache-2.0
"""How wide are the error bars of the quickstart, over five seeds?

Runs the functions of ``examples/quickstart.py``, and also ``dvi.Laplace`` without ``polish``, which leaves the
predictions of the trained network as they are.
"""

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
from pyro.ops.stats import split_gelman_rubin

from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings
from benchmarks.shared.tables import mean_sd, paired, provenance, table

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart.py"


@cache
def example() -> ModuleType:
    """The example as a module."""
    sys.path.insert(0, str(EXAMPLE.parent))  # of the module beside it
    spec = importlib.util.spec_from_file_location("quickstart", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """Return five seeds."""
    return [{"seed": seed} for seed in range(5)]


def run(settings: Settings, data_dir: str | None) -> Row:
    """Return the scores of each curve, and how well the chains agree."""
    quickstart = example()
    train, test = quickstart.curve(settings["seed"])
    torch.manual_seed(settings["seed"])  # as the example does
    net = quickstart.train_network(train)
    posterior, weights = quickstart.with_error_bars(net, train), quickstart.sample(train)
    methods = quickstart.predictors(net, posterior, weights)
    methods["dvi.Laplace without polish"] = quickstart.with_error_bars(net, train, polish=False).predict
    values = quickstart.functions(weights, quickstart.GAP)  # [draws, chains, inputs]
    return {
        "scores": {name: quickstart.scores(predict, test) for name, predict in methods.items()},
        "r_hat": float(split_gelman_rubin(values, 1, 0).max()),
    }


def report(rows: list[Row], folder: Path) -> str:
    """Write a table of the methods."""
    lines = []
    for name in rows[0]["scores"]:
        nll, sd_data, sd_gap, before, reference = (
            [row["scores"][method][score] for row in rows]
            for method, score in (
                (name, "nll"),
                (name, "sd data"),
                (name, "sd gap"),
                ("trained network", "nll"),
                ("Hamiltonian Monte Carlo", "sd gap"),
            )
        )
        change = None if nll == before else str(paired(nll, before))
        ratio = mean_sd([a / b for a, b in zip(sd_gap, reference, strict=True)])
        lines.append([name, mean_sd(nll), change, mean_sd(sd_data), mean_sd(sd_gap), ratio])
    header = [
        "method",
        "NLL",
        "NLL minus the network's",
        "sd on the data",
        "sd in the gap",
        "relative to Monte Carlo",
    ]
    r_hats = ", ".join(f"{row['r_hat']:.2f}" for row in sorted(rows, key=lambda row: row["seed"]))
    return (
        f"{table(header, lines)}\nMean ± standard deviation (sd); differences are paired by seed, ± half the 95 % "
        f"interval, and bold if it excludes zero. Largest split R-hat of the Monte Carlo chains in the gap, by seed: "
        f"{r_hats}. {provenance('quickstart', rows)}\n"
    )


BENCHMARK = Benchmark(
    "quickstart", "How wide are the quickstart's error bars, over five seeds?", plan, run, report
)
