# SPDX-License-Identifier: Apache-2.0
"""What does a step of VOGN, OGN or IVON cost? Time and memory relative to Adam, to MAP and to sampled VI, in one run.

"Adam" is a plain step in torch alone (cross-entropy, backward, Adam; unfused, and fused); the others are whole steps
of Pyro's SVI, model and guide included, with MAP's (AutoDelta, Trace_ELBO) among them, which tells how much of a ratio
is Pyro's. All see the same batch in turn (A B C A B C ...), and medians of the paired ratios are taken over rounds, so
that a drifting machine hits all alike. Peak memory is that of a process of its own for each, less what it needs to
import and to hold the batch.

    python benchmarks/vogn_speed.py                   # CPU
    python benchmarks/vogn_speed.py --device cuda
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyro
import torch
from networks import lenet, mlp, resnet18_cifar
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoNormal
from torch import Tensor, nn

from pyro_dvi.bayesian import classifier, init_to_module, to_bayesian_
from pyro_dvi.elbos.natural_gradient import NaturalGradientELBO
from pyro_dvi.guides.natural_gradient import NaturalGradientGuide
from pyro_dvi.optim import IVON, OGN, VOGN

RESULTS = Path(__file__).parent / "results"
NUM_DATA = 50_000
LR = 1e-4
Step = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A network with the shape of its inputs."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int
    rounds: int

    def data(self, device: str) -> tuple[Tensor, Tensor]:
        """One batch."""
        torch.manual_seed(0)
        x = torch.randn(self.batch, *self.shape, device=device)
        return x, torch.randint(10, (self.batch,), device=device)


CASES = {
    "MLP 784-400-400-10, batch 128": Case(lambda: mlp((784, 400, 400, 10), nn.ReLU), (784,), 128, 60),
    "LeNet, batch 128": Case(lenet, (1, 28, 28), 128, 60),
    "ResNet-18 with CIFAR stem, batch 16": Case(resnet18_cifar, (3, 32, 32), 16, 11),
}


def plain(case: Case, device: str, *, fused: bool) -> Step:
    """A step of Adam, as a training loop in torch has it."""
    net = case.make().to(device)
    adam = torch.optim.Adam(net.parameters(), LR, fused=fused, foreach=False if not fused else None)
    x, y = case.data(device)

    def step() -> object:
        adam.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        adam.step()
        return loss.item()

    return step


def svi(case: Case, device: str, guide_of: Callable, optimizer: Any, loss: Any) -> Step:
    """A step of SVI, with a parameter store of its own: all networks have the same names."""
    model = classifier(to_bayesian_(case.make().to(device), prior_scale=1.0), num_data=NUM_DATA)
    guide = guide_of(model)
    x, y = case.data(device)
    step = SVI(model, guide, optimizer, loss).step
    with pyro.get_param_store().scope() as parameters:
        step(x, y)

    def scoped() -> object:
        with pyro.get_param_store().scope(parameters):
            return step(x, y)

    return scoped


def _natural(optimizer: Callable) -> Callable[[Case, str], Step]:
    def make(case: Case, device: str) -> Step:
        loss = NaturalGradientELBO(kl_weight=0.1)
        return svi(case, device, NaturalGradientGuide, optimizer({"lr": LR}), loss)

    return make


def _pyro(guide: Callable, **options: Any) -> Callable[[Case, str], Step]:
    def make(case: Case, device: str) -> Step:
        def guide_of(model: Any) -> Any:
            return guide(model, init_loc_fn=init_to_module, **options)

        return svi(case, device, guide_of, pyro.optim.Adam({"lr": LR}), Trace_ELBO())

    return make


ADAM, FUSED, MAP = "Adam", "Adam, fused", "MAP (AutoDelta, Trace_ELBO)"
CONTESTANTS: dict[str, Callable[[Case, str], Step]] = {
    ADAM: lambda case, device: plain(case, device, fused=False),
    FUSED: lambda case, device: plain(case, device, fused=True),
    MAP: _pyro(AutoDelta),
    "VI (AutoNormal, Trace_ELBO)": _pyro(AutoNormal, init_scale=0.01),
    "VOGN": _natural(VOGN),
    "OGN": _natural(OGN),
    "IVON": _natural(IVON),
}


def measure(name: str, rounds: int | None, device: str) -> list[dict[str, Any]]:
    """Times of all contestants, and their peak memory."""
    case = CASES[name]
    steps = {contestant: make(case, device) for contestant, make in CONTESTANTS.items()}
    times: dict[str, list[float]] = {contestant: [] for contestant in steps}
    for number in range((rounds or case.rounds) + 3):
        for contestant, step in steps.items():
            start = time.perf_counter()
            step()  # ends with the loss as a number, which waits for the device
            if device == "cuda":
                torch.cuda.synchronize()
            if number >= 3:  # the first rounds create parameters and optimizer state
                times[contestant].append(time.perf_counter() - start)
    pyro.clear_param_store()
    del steps
    memory = {contestant: _peak_of_process(name, contestant, device) for contestant in CONTESTANTS}
    rows = []
    for contestant, values in times.items():
        ratios = {
            base: [t / b for t, b in zip(values, times[base], strict=True)] for base in (ADAM, FUSED, MAP)
        }
        rows.append(
            {
                "case": name,
                "step": contestant,
                "median_ms": 1e3 * statistics.median(values),
                "over": {base: statistics.median(found) for base, found in ratios.items()},
                "quartiles": statistics.quantiles(ratios[ADAM], n=4)[::2],
                "peak_mib": memory[contestant],
                "rounds": len(values),
            }
        )
    return rows


def _peak_of_process(name: str, contestant: str, device: str) -> float:
    command = [sys.executable, __file__, "--peak", name, contestant, "--device", device]
    command += ["--threads", str(torch.get_num_threads())]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def peak(name: str, contestant: str, device: str) -> float:
    """MiB that three steps need at most, beyond imports and the batch."""
    case = CASES[name]
    case.data(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak so far, of imports, is forgotten
        before = _status("VmRSS")
    step = CONTESTANTS[contestant](case, device)
    for _ in range(3):
        step()
    after = torch.cuda.max_memory_allocated() if device == "cuda" else _status("VmHWM")
    return (after - before) / 2**20


def _status(entry: str) -> int:
    """Bytes, by the system's account of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(entry)).split()[1])


def table(rows: list[dict[str, Any]], machine: str) -> str:
    """The results in Markdown."""
    lines = [
        f"Step times, interleaved; medians, with the quartiles of the paired ratios over Adam. {machine}.",
        "",
    ]
    for case in dict.fromkeys(row["case"] for row in rows):
        found = [row for row in rows if row["case"] == case]
        adam = found[0]["peak_mib"]
        lines += [
            f"**{case}** ({found[0]['rounds']} rounds)",
            "",
            "| step | ms | over Adam | quartiles | over fused Adam | over MAP | peak MiB | over Adam |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for row in found:
            low, high = row["quartiles"]
            over = row["over"]
            lines.append(
                f"| {row['step']} | {row['median_ms']:.1f} | {over[ADAM]:.2f} | {low:.2f} to {high:.2f} "
                f"| {over[FUSED]:.2f} | {over[MAP]:.2f} | {row['peak_mib']:.0f} | {row['peak_mib'] / adam:.2f} |"
            )
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, help="timed rounds (default: by the size of the case)")
    parser.add_argument("--cases", nargs="+", help="parts of case names")
    parser.add_argument("--show", action="store_true", help="print only, write no results")
    parser.add_argument("--peak", nargs=2, metavar=("CASE", "STEP"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peak:
        print(peak(*options.peak, options.device))
        return
    rows = []
    for case in CASES:
        if options.cases is None or any(part.lower() in case.lower() for part in options.cases):
            found = measure(case, options.rounds, options.device)
            rows += found
            print(table(found, case), flush=True)
    if options.show:
        return
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"{platform.machine()} CPU"
    machine = f"{where}, {options.threads} threads, torch {torch.__version__}, pyro {pyro.__version__}"
    name = "vogn_speed_cuda" if options.device == "cuda" else "vogn_speed"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))
    (RESULTS / f"{name}.md").write_text(table(rows, machine))


if __name__ == "__main__":
    main()
