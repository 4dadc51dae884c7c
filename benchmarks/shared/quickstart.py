# SPDX-License-Identifier: Apache-2.0
"""What does the quickstart show, over five seeds, and at which settings?

``dvi.tune`` chooses step size, prior scale and temperature of every method in ``examples/quickstart.py``, with at most
12 trainings each, on validation data of a seed that is not shown. The network of the curve is chosen by its own NLL,
and LaplaceGuide and Monte Carlo take its prior. The example holds the chosen settings as constants, and a test compares
them with these lines. The second stage runs the functions of the example.
"""

import importlib.util
import sys
import warnings
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from pyro.ops.stats import split_gelman_rubin

import pyro_dvi as dvi
from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings
from benchmarks.shared.tables import mean_sd, paired, provenance, table

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart.py"
TUNING_SEED, SEEDS, MAX_TRAININGS = 100, (0, 1, 2, 3, 4), 12
CURVE = "curve"
PRIORS = (1.0, 2.0, 3.0, 5.0, 10.0)
POINT = {"lr": (0.001, 0.003, 0.01, 0.03), "prior": PRIORS}
COLD = {"temperature": (0.01, 0.1, 1.0)}
SPACES: dict[str, dict[str, tuple[Any, ...]]] = {
    CURVE: {"lr": (0.01, 0.03, 0.1), "prior": (0.5, 1.0, 2.0)},
    "MAP": POINT,
    "ensemble of 5 MAP": POINT,
    "Laplace": POINT | {"weights": ("last layer", "Kronecker")},
    "Variational Laplace": POINT | COLD,
    "VOGN": {"max_step": (0.015, 0.05, 0.15, 0.5), "prior": PRIORS} | COLD,
}


@cache
def example() -> ModuleType:
    """The example as a module."""
    sys.path.insert(0, str(EXAMPLE.parent))  # of the modules beside it
    spec = importlib.util.spec_from_file_location("quickstart", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["quickstart"] = module  # its data classes look themselves up there
    spec.loader.exec_module(module)
    return module


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """First tune everything; then run the example, once its constants are what was chosen."""
    wanted: list[Settings] = [{"stage": "tune", "method": name, "seed": TUNING_SEED} for name in SPACES]
    for name, settings in chosen(rows).items():
        if example().SETTINGS[name] == settings:
            wanted += [{"stage": "test", "method": name, "seed": seed} for seed in SEEDS]
    return wanted


def chosen(rows: list[Row]) -> dict[str, Settings]:
    """Return the settings that were chosen, by method."""
    return {row["method"]: row["chosen"] for row in rows if row["stage"] == "tune"}


def run(settings: Settings, data_dir: str | None) -> Row:
    """Choose settings, or run the example with those that it holds."""
    name, seed = settings["method"], settings["seed"]
    if settings["stage"] == "tune":
        return tuned(name, seed)
    quickstart = example()
    if name == CURVE:
        return curve_row(seed)
    rows, _, _ = quickstart.digit_scores(name, quickstart.Training(quickstart.noisy_digits(seed)))
    return {"scores": {one: {key: float(v) for key, v in row.items()} for one, row in rows.items()}}


def tuned(name: str, seed: int) -> Row:
    """Choose the settings of a method by its NLL on validation data."""
    quickstart = example()
    if name == CURVE:
        data = quickstart.curve(seed)

        def train(**settings: Any) -> tuple[Any, Any]:
            net = quickstart.train_network(data, **settings)
            return net, net

        def score(model: Any, guide: Any, validation: Any) -> Any:
            x, y = validation
            outputs = model(x).squeeze(-1).detach()
            return -torch.distributions.Normal(outputs, quickstart.NOISE).log_prob(y)
    else:
        training = quickstart.Training(quickstart.noisy_digits(seed))
        data = training.data

        def train(**settings: Any) -> tuple[Any, Any]:
            return quickstart.METHODS[name](training, **settings)  # type: ignore[no-any-return]

        def score(model: Any, guide: Any, validation: Any) -> Any:
            x, labels = validation
            return quickstart.nll(quickstart.probabilities(name, model, guide, x), labels)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = dvi.tune(
            train,
            data.validation,
            SPACES[name],
            score=score,
            max_trainings=MAX_TRAININGS,
            seed=seed,
            progress=False,
        )
    ends = [key for key in SPACES[name] if any(f"the best {key}, " in str(one.message) for one in caught)]
    tried = {key: list(values) for key, values in found.table.items()}
    return {"chosen": found.settings, "ends": ends, "tried": tried}


def curve_row(seed: int) -> Row:
    """Return the scores of the three curves, and how well the chains agree."""
    quickstart = example()
    data, found, weights = quickstart.curves(seed)
    prior = quickstart.SETTINGS[CURVE]["prior"]
    values = quickstart.functions(weights, data.others["gap"], prior)  # [draws, chains, inputs]
    return {
        "scores": {name: quickstart.curve_scores(data, predict) for name, predict in found.items()},
        "r_hat": float(split_gelman_rubin(values, 1, 0).max()),
    }


COLUMNS = {"digits": ("nll", "accuracy", "ece", "auroc"), "curve": ("nll", "sd data", "sd gap")}
HEADERS = {
    "digits": [
        "method",
        "NLL",
        "NLL minus MAP's",
        "accuracy",
        "ECE",
        "AUROC, shuffled pixels",
        "AUROC minus MAP's",
    ],
    "curve": ["method", "NLL", "NLL minus the network's", "sd on the data", "sd in the gap"],
}


def report(rows: list[Row], folder: Path) -> str:
    """Write the settings, and a table for each task."""
    settings = [
        [r["method"], *(_setting(r, key) for key in ("lr", "max_step", "prior", "temperature", "weights"))]
        for r in sorted(
            (r for r in rows if r["stage"] == "tune"), key=lambda r: list(SPACES).index(r["method"])
        )
    ]
    header = ["method", "step size", "`max_step`", "multiple of the prior scale", "temperature", "weights"]
    text = [f"**Settings chosen**\n\n{table(header, settings)}"]
    at_end = any(r["ends"] for r in rows if r["stage"] == "tune")
    text.append(
        f"{'†: the chosen' if at_end else 'No chosen'} value is at an end of the values that were tried.\n"
    )
    tested = sorted((r for r in rows if r["stage"] == "test"), key=lambda r: r["seed"])
    for task, columns in COLUMNS.items():
        of_task = [r for r in tested if (r["method"] == CURVE) == (task == CURVE)]
        scores: dict[str, list[Row]] = {}
        for row in of_task:
            for name, found in row["scores"].items():
                scores.setdefault(name, []).append(found)
        names = [name for name in _order(scores)]
        lines = []
        for name in names:
            against = [
                None
                if name == names[0]
                else str(paired(*([r[c] for r in scores[n]] for n in (name, names[0]))))
                for c in ("nll", columns[-1])
            ]
            cells = [mean_sd([r[column] for r in scores[name]]) for column in columns[1:]]
            last = against[1:] if task == "digits" else []
            lines.append([name, mean_sd([r["nll"] for r in scores[name]]), against[0], *cells, *last])
        text.append(f"**{task.capitalize()}**\n\n{table(HEADERS[task], lines)}")
    agree = max((r["r_hat"] for r in tested if "r_hat" in r), default=float("nan"))
    text.append(
        "Mean ± standard deviation; differences are paired by seed, ± half the 95 % interval, and bold if it excludes "
        f"zero. Hamiltonian Monte Carlo: largest split R-hat of the function in the gap {agree:.2f}. "
        f"{provenance('quickstart', rows)}"
    )
    return "\n".join([*text, ""])


def _setting(row: Row, key: str) -> str | None:
    """Return a chosen value, marked where it is at an end."""
    value = row["chosen"].get(key)
    shown = f"{value:g}" if isinstance(value, float) else value
    return f"{shown} †" if key in row["ends"] else shown


def _order(scores: dict[str, list[Row]]) -> list[str]:
    """Return the names in the order of the example: MAP, MAP scaled, and so on."""
    quickstart = example()
    first = ["MAP", quickstart.SCALED, *quickstart.METHODS]
    return sorted(scores, key=lambda name: first.index(name) if name in first else 0)


BENCHMARK = Benchmark("quickstart", "What does the quickstart show, over five seeds?", plan, run, report)
