# SPDX-License-Identifier: Apache-2.0
"""A benchmark: a question, the runs that answer it, and the report on them."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, Literal

import torch

__all__ = ["RESULTS", "Benchmark", "Budget", "Row", "Settings", "all_benchmarks", "device"]

RESULTS = Path(__file__).parents[1] / "results"
CHAPTERS = ("vl", "moments", "natural_gradients", "laplace", "predict", "shared")

Settings = dict[str, Any]
Row = dict[str, Any]
Budget = Literal["small", "gpu"]


@dataclass(frozen=True)
class Benchmark:
    """A question, the runs that answer it, and the report on them.

    Attributes:
        name: of its files in ``results``: ``NAME.jsonl`` has a line for each finished run, ``NAME.md`` is the report.
        question: what it asks, in one line.
        plan: given the lines that are there and the budget, returns the settings of all runs that are wanted. It is
            asked again until it wants nothing new, so that later runs may follow from the results of earlier ones.
            Settings are flat, of numbers and strings, and are what a run is known by.
        run: from settings and the folder with the data (None: PYRO_DVI_DATA, or a download) to measurements.
        report: writes figures into a folder, if it has any, and returns the text of ``NAME.md``.
        timed: whether its runs are timed, and so have the machine to themselves.
    """

    name: str
    question: str
    plan: Callable[[list[Row], Budget], list[Settings]]
    run: Callable[[Settings, str | None], Row]
    report: Callable[[list[Row], Path], str]
    timed: bool = False


def all_benchmarks() -> dict[str, tuple[Benchmark, str]]:
    """Return every benchmark with the name of its module, by name and in the order of the chapters."""
    found = {}
    for chapter in CHAPTERS:
        package = import_module(f"benchmarks.{chapter}")
        for info in iter_modules(package.__path__):
            module = f"{package.__name__}.{info.name}"
            benchmark = getattr(import_module(module), "BENCHMARK", None)
            if isinstance(benchmark, Benchmark):
                found[benchmark.name] = (benchmark, module)
    return found


def device() -> torch.device:
    """Return where the data of this run belong, ``--device``; networks and priors follow their data."""
    return torch.device(os.environ.get("PYRO_DVI_DEVICE", "cpu"))
