# SPDX-License-Identifier: Apache-2.0
"""Runs that are wanted and not there yet, in processes of their own; each finished run is a line of a file."""

import json
import multiprocessing
import os
import platform
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import import_module
from pathlib import Path

from tqdm import tqdm

from benchmarks.shared.benchmark import RESULTS, Benchmark, Budget, Row, Settings

__all__ = ["append_row", "forget_rows", "read_rows", "run_all", "write_report"]


def run_all(
    benchmark: Benchmark,
    module: str,
    data_dir: str | None = None,
    budget: Budget = "small",
    jobs: int = 2,
    wanted: Callable[[Settings], bool] = lambda settings: True,
    results: Path = RESULTS,
) -> list[str]:
    """Train what is not there yet, and return what went wrong, a text for each run that failed.

    Args:
        benchmark: what to run.
        module: where it is found as ``BENCHMARK``, by the processes that run it.
        data_dir: folder with the data.
        budget: "small" or "gpu".
        jobs: processes at a time; timed benchmarks have one.
        wanted: which settings of the plan to run.
        results: the folder of the lines.
    """
    failed: list[tuple[Settings, str]] = []
    context = multiprocessing.get_context("spawn")  # no threads of the parent, whatever it has imported
    with ProcessPoolExecutor(1 if benchmark.timed else jobs, context) as pool:
        while True:
            rows = read_rows(benchmark.name, results)
            todo = [s for s in benchmark.plan(rows, budget) if wanted(s) and not is_among(s, rows)]
            todo = [s for s in todo if all(s != tried for tried, _ in failed)]
            if not todo:
                return [f"{settings}\n{error}" for settings, error in failed]
            futures = {pool.submit(_run, module, settings, data_dir): settings for settings in todo}
            for future in tqdm(as_completed(futures), desc=benchmark.name, total=len(todo)):
                try:
                    append_row(benchmark.name, future.result(), results)
                except Exception:
                    failed.append((futures[future], traceback.format_exc()))


def is_among(settings: Settings, rows: Iterable[Row]) -> bool:
    """Whether there is a line of these settings."""
    return any(all(key in row and row[key] == value for key, value in settings.items()) for row in rows)


def read_rows(name: str, results: Path = RESULTS) -> list[Row]:
    """Return the lines of a benchmark."""
    path = results / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def forget_rows(name: str, wanted: Callable[[Row], bool], results: Path = RESULTS) -> None:
    """Take out lines, whose runs are then wanted again."""
    rows = [row for row in read_rows(name, results) if not wanted(row)]
    (results / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def append_row(name: str, row: Row, results: Path = RESULTS) -> None:
    """Write a line."""
    results.mkdir(exist_ok=True)
    with (results / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def write_report(benchmark: Benchmark, results: Path = RESULTS) -> bool:
    """Write report and figures from the lines; False if there are none."""
    rows = read_rows(benchmark.name, results)
    if rows:
        (results / f"{benchmark.name}.md").write_text(benchmark.report(rows, results).rstrip("\n") + "\n")
    return bool(rows)


def _run(module: str, settings: Settings, data_dir: str | None) -> Row:
    import pyro
    import torch

    torch.set_num_threads(settings.get("threads", 1))
    pyro.clear_param_store()
    pyro.set_rng_seed(settings.get("seed", 0))
    start = time.process_time()
    measured = import_module(module).BENCHMARK.run(settings, data_dir)
    return {**settings, **measured, "cpu_seconds": round(time.process_time() - start, 2), **_machine()}


def _machine() -> Row:
    import torch

    device = os.environ.get("PYRO_DVI_DEVICE", "cpu")
    name = f"{platform.machine()} CPU" if device == "cpu" else torch.cuda.get_device_name(device)
    return {"torch": torch.__version__, "machine": f"{name}, {torch.get_num_threads()} thread(s)"}
