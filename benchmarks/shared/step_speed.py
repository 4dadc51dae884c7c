# SPDX-License-Identifier: Apache-2.0
"""What does a training step cost over a bare torch step? Time, operator calls, memory, and the price of a capture.

The unit is forward, cross-entropy, backward and ``torch.optim.Adam(fused=True)`` on the same network; everything else
is a whole step of SVI, or of the peer's own loop. Each contestant has a process of its own and takes steps when it is
asked to, so that all take turns (A B C A B C ...) and a drifting machine hits all alike. On small networks a turn is
several steps. Ratios are paired within rounds. On the CPU the time is that of the processor, on one thread.

Variational Laplace differentiates twice, and is measured on networks with softplus over the unit on those; all others
on networks with ReLU. Operator calls are what torch dispatches in a step. Memory is the peak of the first twelve steps
above what the process holds before it makes the network, compilers included. Their caches begin empty.

``PYRO_DVI_BEFORE=<checkout of another version>`` adds our methods of that version to the same rounds.
"""

import json
import os
import statistics
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.shared import step_contestants
from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings, device
from benchmarks.shared.step_contestants import BEFORE, CASES, WARM_UP, contestants, ordinary, unit_of
from benchmarks.shared.tables import provenance, table

CLOCKS = {"cpu": "processor", "cuda": "wall"}
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # in the process, where its time is counted
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
}


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """Each network."""
    where = "cpu" if budget == "small" else "cuda"
    return [{"case": case, "device": where, "clock": CLOCKS[where]} for case in CASES]


def run(settings: Settings, data_dir: str | None) -> Row:
    """A line for each contestant."""
    case, found = settings["case"], {}
    names = contestants(case, settings["device"], _before() is not None)
    units = {unit_of(name) for name in names}
    others = [name for name in names if name not in units]
    for start in range(0, len(others), CASES[case].at_once):
        group = others[start : start + CASES[case].at_once]
        found |= _together(case, [*{unit_of(name): None for name in group}, *group])
    peers = [
        f"{name} {found_version}"
        for name in ("jax", "numpyro", "ivon-opt")
        if (found_version := _version(name))
    ]
    failed = [name for name in names if name not in found]
    note = f"Peers: {', '.join(peers) or 'none'}."
    return {"steps": [found[name] for name in names if name in found], "failed": failed, "note": note}


def report(rows: list[Row], folder: Path) -> str:
    """A table for each network."""
    rows = [row for row in rows if "clock" in row]  # earlier lines had another unit
    text = [
        provenance("step_speed", rows),
        "Times of training steps relative to a bare torch step with fused Adam; the steps of a group, which includes "
        "the bare step, are measured alternately. In fit: steps inside `fit`, on data that are on the device. Start: "
        "additional seconds of the first steps, in which a step is captured or compiled, compared with as many median "
        f"steps ({WARM_UP}, more inside `fit`). Pays after: "
        "the number of steps that make up for the longer start. Operator calls and peak memory are relative to the "
        "bare step.",
    ]
    for row in sorted(rows, key=lambda row: (list(CASES).index(row["case"]), row["device"])):
        where = "processor time on one thread" if row["device"] == "cpu" else f"time on {row['machine']}"
        steps = {step["step"]: step for step in row["steps"]}
        text.append(f"**{row['case']}**, {where}")
        header = [
            "step",
            "ms",
            "relative to bare step",
            "quartiles",
            "operator calls",
            "peak memory",
            "start in s",
            "pays after",
        ]
        text.append(table(header, [_cells(step, steps) for step in steps.values()]).rstrip())
        if row["failed"]:
            text.append(f"Ended by an error: {'; '.join(row['failed'])}.")
    return "\n\n".join(text)


def _cells(step: Row, steps: dict[str, Row]) -> list[str | None]:
    unit, (low, high) = steps[unit_of(step["step"])], step["quartiles"]
    return [
        step["step"],
        f"{step['median_ms']:.2f}",
        f"{step['time']:.2f}",
        f"{low:.2f} to {high:.2f}",
        None if step["calls"] is None else f"{step['calls'] / unit['calls']:.2f}",
        f"{step['mebibytes'] / unit['mebibytes']:.2f}",
        f"{step['start_seconds']:.2f}",
        _pays_after(step, steps.get(ordinary(step["step"]), step)),
    ]


def _pays_after(step: Row, plain: Row) -> str | None:
    """Steps whose saved time makes up for the capture, which is what the start takes beyond the ordinary one's."""
    if step is plain:
        return None
    saved = 1e-3 * (plain["median_ms"] - step["median_ms"])
    later = step["start_seconds"] - plain["start_seconds"]
    return f"{max(0, ceil(later / saved)):,}" if saved > 0 else "never"


BENCHMARK = Benchmark(
    "step_speed",
    "How much more does a training step cost than a bare torch step?",
    plan,
    run,
    report,
    timed=True,
)


def _before() -> str | None:
    return os.environ.get("PYRO_DVI_BEFORE")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


class ContestantFailed(Exception):
    """A contestant's process has ended by itself."""


class Process:
    """A contestant that has taken its first steps, ready to take more."""

    def __init__(self, case: str, contestant: str) -> None:
        command = [sys.executable, step_contestants.__file__, case, contestant, str(device())]
        here = Path(__file__).parents[2]
        checkout = _before() if contestant.endswith(BEFORE) else here
        self._cache = TemporaryDirectory()
        environment = {
            **os.environ,
            **ONE_THREAD,
            "PYTHONPATH": os.pathsep.join(
                str(path) for path in (checkout, here, os.environ.get("PYTHONPATH")) if path
            ),
            "TORCHINDUCTOR_CACHE_DIR": self._cache.name,
        }
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.times: list[float] = []
        self.found = json.loads(self._read(contestant))

    def step(self) -> None:
        """Take a turn."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self.times.append(float(self._read("a turn")))

    def _read(self, what: str) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ContestantFailed(f"{what}: the process has ended; its error is above")
        return line

    def end(self) -> None:
        """Let it go."""
        self._process.communicate()
        self._cache.cleanup()


def _together(case: str, names: list[str]) -> dict[str, dict[str, Any]]:
    """Lines of contestants that take turns; they start one after the other. Those that fail have none."""
    running: dict[str, Process] = {}
    for name in names:
        with suppress(ContestantFailed):
            running[name] = Process(case, name)
    for _ in range(CASES[case].rounds):
        for name, process in list(running.items()):
            try:
                process.step()
            except ContestantFailed:
                del running[name]
    found = {}
    for name, process in running.items():
        process.end()
        unit, median = running[unit_of(name)], statistics.median(process.times)
        ratios = [mine / theirs for mine, theirs in zip(process.times, unit.times, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        found[name] = {
            "step": name,
            "median_ms": round(1e3 * median, 4),
            "time": round(middle, 4),
            "quartiles": [round(low, 4), round(high, 4)],
            "rounds": len(ratios),
            "start_seconds": round(process.found["first_seconds"] - process.found["first_steps"] * median, 3),
            "calls": process.found["calls"],
            "mebibytes": round(process.found["mebibytes"], 2),
        }
    return found
