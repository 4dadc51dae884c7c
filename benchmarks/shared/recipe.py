# SPDX-License-Identifier: Apache-2.0
"""Does README's recipe hold on tasks that it was not written for?

README's block with ``def fit`` is run as printed from there on, with other data: only the sizes of network and data
are replaced. MAP goes through the same search with the same step sizes and prior scales.
"""

import re
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pyro
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoDelta
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import pyro_dvi as dvi
from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings
from benchmarks.shared.images import load_split
from benchmarks.shared.regressions import load
from benchmarks.shared.tables import mean_sd, paired, provenance, table

README = Path(__file__).parents[2] / "README.md"
SEEDS = (0, 1, 2, 3, 4)
Part = tuple[Tensor, Tensor]


def mnist(data_dir: str | None, seed: int) -> tuple[Part, Part, Part]:
    """1,000 images for training, 500 for the choice."""
    split = load_split("MNIST", 1000, 500, 5000, seed, data_dir)
    return tuple((x.flatten(1), y) for x, y in (split.train, split.validation, split.test))  # type: ignore[return-value]


def good_wine(data_dir: str | None, seed: int) -> tuple[Part, Part, Part]:
    """Red wines of quality 6 or better, or not."""
    x, y = load("wine-quality-red", data_dir)
    return _parts(x, y > 5, seed)


def breast_cancer(data_dir: str | None, seed: int) -> tuple[Part, Part, Part]:
    """Scikit-learn's cells, benign or not."""
    from sklearn.datasets import load_breast_cancer

    x, y = (torch.as_tensor(part) for part in load_breast_cancer(return_X_y=True))
    return _parts(x, y, seed)


def _parts(x: Tensor, y: Tensor, seed: int) -> tuple[Part, Part, Part]:
    """Shares of 60, 20 and 20 per cent, standardised by the first."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    parts = order.tensor_split([int(0.6 * len(x)), int(0.8 * len(x))])
    centre, scale = x[parts[0]].mean(0), x[parts[0]].std(0)
    return tuple((((x[rows] - centre) / scale).float(), y[rows].long()) for rows in parts)  # type: ignore[return-value]


TASKS: dict[str, Callable[[str | None, int], tuple[Part, Part, Part]]] = {
    "MNIST, 1,000 images": mnist,
    "wine, good or not": good_wine,
    "breast cancer": breast_cancer,
}
METHODS = ("MAP", "README")


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """Both methods on every task with every seed."""
    return [{"task": task, "seed": seed, "method": m} for task in TASKS for seed in SEEDS for m in METHODS]


def recipe(inputs: int, classes: int, num_data: int) -> str:
    """README's block from ``def fit`` to the prediction, for another network and other data."""
    block = re.search(r"```python\n((?:(?!```).)*?def fit\(.*?)```", README.read_text(), re.DOTALL)
    assert block is not None
    code = block[1][block[1].index("def fit(") : block[1].index("print(tuned.settings)")]
    for there, here in (
        ("nn.Linear(64, 100)", f"nn.Linear({inputs}, 100)"),
        ("nn.Linear(100, 10)", f"nn.Linear(100, {classes})"),
        ("num_data=1200", f"num_data={num_data}"),
    ):
        assert there in code, f"README has no {there} any more"
        code = code.replace(there, here)
    return code


def run(settings: Settings, data_dir: str | None) -> Row:
    """Run README's block, or MAP in its place."""
    parts: list[Dataset[Any]] = [
        TensorDataset(*p) for p in TASKS[settings["task"]](data_dir, settings["seed"])
    ]
    train, validation, test = parts
    x, y = train[:]
    loader = DataLoader(train, batch_size=100, shuffle=True)
    names: dict[str, Any] = {"nn": nn, "dvi": dvi, "SVI": SVI, "DataLoader": DataLoader}
    names |= {"loader": loader, "validation": validation, "test": test}
    code = recipe(x.shape[1], int(y.max()) + 1, len(x))
    if settings["method"] == "MAP":
        for there, here in (
            ("def fit(lr, prior_scale, temperature)", "def fit(lr, prior_scale)"),
            ("dvi.MeanFieldGuide(model)", "map_guide(model)"),
            ("dvi.TaylorELBO(temperature=temperature)", "dvi.SampledELBO()"),
            (', "temperature": (0.01, 0.1, 1.0)', ""),
        ):
            assert there in code, f"README has no {there} any more"
            code = code.replace(there, here)
        names["map_guide"] = lambda model: AutoDelta(model, init_loc_fn=dvi.bayesian.init_to_module)
    exec(code, names)
    metrics, tuned = names["prediction"].metrics(), names["tuned"]
    pyro.clear_param_store()
    found = {name: metrics[name] for name in ("nll", "accuracy", "ece")}
    return found | {"chosen": tuned.settings, "trainings": tuned.table.rows}


def report(rows: list[Row], folder: Path) -> str:
    """A line for each task and method."""
    lines = []
    for task in TASKS:
        by_method = {
            m: sorted((r for r in rows if (r["task"], r["method"]) == (task, m)), key=_seed) for m in METHODS
        }
        for method, own in by_method.items():
            if not own:
                continue
            nll, point = [row["nll"] for row in own], [row["nll"] for row in by_method["MAP"]]
            against = paired(nll, point) if method != "MAP" and len(nll) == len(point) else None
            others = [f"{mean(row[name] for row in own):.3f}" for name in ("accuracy", "ece")]
            lines.append([task, method, mean_sd(nll), against, *others])
    header = ["task", "method", "NLL", "NLL minus MAP's", "accuracy", "ECE"]
    about = (
        "Mean ± standard deviation over seeds; differences are paired by seed, ± half the 95 % interval, and bold if "
        "the interval excludes zero. README: Variational Laplace as printed in the README. MAP: the same search "
        "without a temperature."
    )
    return "\n\n".join([provenance("recipe", rows), about, table(header, lines)])


def _seed(row: Row) -> int:
    return int(row["seed"])


BENCHMARK = Benchmark("recipe", "Does the README's recipe also work on other tasks?", plan, run, report)
