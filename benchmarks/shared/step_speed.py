# SPDX-License-Identifier: Apache-2.0
"""What does a training step cost? Time, operations, operator calls and memory over a bare step of Adam in torch.

The unit is forward, cross-entropy, backward and ``torch.optim.Adam`` as it comes, on the same network; everything else
is a whole step of Pyro's SVI, or of the peer's own loop. Each contestant has a process of its own and takes steps when
it is asked to, so that all take turns (A B C A B C ...) and a drifting machine hits all alike. On small networks a turn
is several steps. Ratios are paired within rounds.

Variational Laplace differentiates twice, and is measured on networks with softplus over Adam on those; all others on
networks with ReLU. Operations are multiplications and additions of matrices and convolutions, operator calls what
torch dispatches, both of the fifth step with four examples. Memory is the peak of three steps above what the process
holds before it makes the network.

``PYRO_DVI_BEFORE=<checkout of another version>`` adds the same methods of that version to the same rounds.
"""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.shared import step_contestants
from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings, device
from benchmarks.shared.step_contestants import BEFORE, CASES, SMOOTH, TWICE, UNIT, contestants
from benchmarks.shared.tables import provenance, table


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """Each network, with one and two threads; on a GPU with one."""
    where = [("cpu", 1), ("cpu", 2)] if budget == "small" else [("cuda", 1)]
    return [{"case": case, "device": name, "threads": threads} for case in CASES for name, threads in where]


def run(settings: Settings, data_dir: str | None) -> Row:
    """A line for each contestant."""
    others = [
        name for name in contestants(settings["case"], _before() is not None) if name not in (UNIT, SMOOTH)
    ]
    size = CASES[settings["case"]].at_once
    groups = [others[start : start + size] for start in range(0, len(others), size)]
    steps = [row for group in groups for row in _together(settings, [UNIT, SMOOTH, *group])]
    return {"steps": list({row["step"]: row for row in steps}.values())}


def report(rows: list[Row], folder: Path) -> str:
    """A table for each network and number of threads."""
    text = [
        provenance("step_speed", rows),
        "Training steps over a bare step of Adam in torch; each table is one interleaved run.",
    ]
    for row in sorted(rows, key=lambda row: (list(CASES).index(row["case"]), row["device"], row["threads"])):
        rounds, threads = row["steps"][0]["rounds"], row["threads"]
        where = f"{threads} thread{'s' * (threads > 1)}" if row["device"] == "cpu" else row["machine"]
        text.append(f"**{row['case']}**, {where} ({rounds} rounds)")
        header = ["step", "ms", "time", "quartiles", "operations", "operator calls", "peak memory"]
        text.append(table(header, [_cells(step) for step in row["steps"]]).rstrip())
    return "\n\n".join(text)


def _cells(step: Row) -> list[str]:
    low, high = step["quartiles"]
    counts = [f"{step[key]:.2f}" for key in ("operations", "calls", "mebibytes")]
    return [
        step["step"],
        f"{step['median_ms']:.2f}",
        f"{step['time']:.2f}",
        f"{low:.2f} to {high:.2f}",
        *counts,
    ]


BENCHMARK = Benchmark(
    "step_speed", "What does a training step cost, over a bare step of Adam?", plan, run, report, timed=True
)


def _before() -> str | None:
    return os.environ.get("PYRO_DVI_BEFORE")


class Process:
    """A contestant, ready to take steps."""

    def __init__(self, case: str, contestant: str, threads: int) -> None:
        command = [sys.executable, step_contestants.__file__, case, contestant, str(device()), str(threads)]
        here = Path(__file__).parents[2]
        version = _before() if contestant.endswith(BEFORE) else here
        environment = {
            **os.environ,
            "PYTHONPATH": f"{version}{os.pathsep}{here}",
            "OMP_NUM_THREADS": str(threads),
        }
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.times: list[float] = []

    def wait(self) -> None:
        """Until it is ready to take steps."""
        self.found = json.loads(self._read())

    def step(self) -> None:
        """Take a turn."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self.times.append(float(self._read()))

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a contestant's process has ended; its error is above")
        return line

    def end(self) -> None:
        """Let it go."""
        self._process.communicate()


def _together(settings: Settings, names: list[str]) -> list[dict[str, Any]]:
    """Lines of contestants that take turns."""
    case = settings["case"]
    running = {name: Process(case, name, settings["threads"]) for name in names}
    for process in running.values():
        process.wait()
    for _ in range(CASES[case].rounds):
        for process in running.values():
            process.step()
    steps = []
    for name, process in running.items():
        process.end()
        unit = running[SMOOTH if name.startswith(TWICE) else UNIT]
        ratios = [mine / theirs for mine, theirs in zip(process.times, unit.times, strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4)
        steps.append(
            {
                "step": name,
                "median_ms": round(1e3 * statistics.median(process.times), 4),
                "time": round(median, 4),
                "quartiles": [round(low, 4), round(high, 4)],
                "rounds": len(ratios),
                **{key: process.found[key] / unit.found[key] for key in ("operations", "calls", "mebibytes")},
            }
        )
    return steps
