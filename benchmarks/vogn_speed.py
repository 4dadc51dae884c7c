# SPDX-License-Identifier: Apache-2.0
"""What does a step of VOGN, OGN or IVON cost? Times relative to MAP and to sampled VI, in one interleaved run.

All contestants are steps of Pyro's SVI on the same batches in turn (A B C A B C ...), and medians are taken over
rounds, so that a drifting machine hits all alike.

    python benchmarks/vogn_speed.py                   # CPU
    python benchmarks/vogn_speed.py --device cuda
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import torch
from networks import lenet, resnet18_cifar
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
MAP, VI = "MAP (AutoDelta, Trace_ELBO)", "VI (AutoNormal, Trace_ELBO)"
Step = Callable[[Tensor, Tensor], object]

CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "LeNet, batch 128": (lenet, (1, 28, 28)),
    "ResNet-18 (CIFAR stem), batch 16": (resnet18_cifar, (3, 32, 32)),
}


def contestants(make: Callable[[], nn.Module], device: str) -> dict[str, Step]:
    """Return a step of each method. Nets have names of their own, so that parameters stay apart."""

    def step(name: str, guide_of: Callable, optimizer: Any, loss: Any) -> Step:
        model = classifier(to_bayesian_(make().to(device), prior_scale=1.0), num_data=NUM_DATA)
        guide = guide_of(model)
        model._pyro_name = f"model {name}"
        guide._pyro_set_supermodule(f"guide {name}", guide._pyro_context)
        return SVI(model, guide, optimizer, loss).step

    def delta(model: Any) -> Any:
        return AutoDelta(model, init_loc_fn=init_to_module)

    def normal(model: Any) -> Any:
        return AutoNormal(model, init_loc_fn=init_to_module, init_scale=0.01)

    steps = {
        MAP: step("map", delta, pyro.optim.Adam({"lr": LR}), Trace_ELBO()),
        VI: step("vi", normal, pyro.optim.Adam({"lr": LR}), Trace_ELBO()),
    }
    for optimizer in (VOGN, OGN, IVON):
        name = optimizer.__name__
        steps[name] = step(
            name, NaturalGradientGuide, optimizer({"lr": LR}), NaturalGradientELBO(kl_weight=0.1)
        )
    return steps


def measure(case: str, rounds: int, device: str) -> list[dict[str, Any]]:
    make, shape = CASES[case]
    batch = int(case.rsplit(" ", 1)[1])
    torch.manual_seed(0)
    x, y = torch.randn(batch, *shape, device=device), torch.randint(10, (batch,), device=device)
    steps = contestants(make, device)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_number in range(rounds + 3):
        for name, step in steps.items():
            start = time.perf_counter()
            step(x, y)  # ends with the loss as a number, which waits for the device
            if device == "cuda":
                torch.cuda.synchronize()
            if round_number >= 3:  # the first rounds create parameters and optimizer state
                times[name].append(time.perf_counter() - start)
    pyro.clear_param_store()
    rows = []
    for name, values in times.items():
        ratios = {base: [t / b for t, b in zip(values, times[base], strict=True)] for base in (MAP, VI)}
        rows.append(
            {
                "case": case,
                "step": name,
                "median_ms": 1e3 * statistics.median(values),
                "over_map": statistics.median(ratios[MAP]),
                "over_map_quartiles": statistics.quantiles(ratios[MAP], n=4)[::2],
                "over_vi": statistics.median(ratios[VI]),
                "rounds": rounds,
            }
        )
    return rows


def table(rows: list[dict[str, Any]], machine: str) -> str:
    lines = [
        f"Step times, interleaved; medians, with the quartiles of the paired ratios over MAP. {machine}.",
        "",
    ]
    for case in dict.fromkeys(row["case"] for row in rows):
        lines += [
            f"**{case}**",
            "",
            "| step | ms | over MAP | quartiles | over VI |",
            "|---|---|---|---|---|",
        ]
        for row in (r for r in rows if r["case"] == case):
            low, high = row["over_map_quartiles"]
            ratios = f"{row['over_map']:.2f} | {low:.2f} to {high:.2f} | {row['over_vi']:.2f}"
            lines.append(f"| {row['step']} | {row['median_ms']:.1f} | {ratios} |")
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
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    for case in CASES:
        if options.cases is None or any(part.lower() in case.lower() for part in options.cases):
            found = measure(case, options.rounds or (60 if "LeNet" in case else 15), options.device)
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
