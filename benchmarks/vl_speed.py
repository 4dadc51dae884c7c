# SPDX-License-Identifier: Apache-2.0
"""What does a step of Variational Laplace cost? Times relative to a plain MAP step, in one interleaved run.

The plain step is torch alone: forward, cross-entropy plus Gaussian prior, backward, Adam. All contestants see the same
batches in turn (A B C A B C ...), and medians are taken over rounds, so that a drifting machine hits all alike.
A penalty that is computed in every k-th step only is timed over whole cycles of k steps.

    python benchmarks/vl_speed.py                     # CPU
    python benchmarks/vl_speed.py --device cuda
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyro
import torch
from networks import lenet, mlp, resnet18_cifar
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoNormal
from torch import Tensor, nn

from pyro_dvi.bayesian import classifier, fan_in, init_to_module, smooth_activations_, to_bayesian_
from pyro_dvi.curvature import Fisher
from pyro_dvi.elbos import TaylorELBO
from pyro_dvi.guides import MeanFieldGuide
from pyro_dvi.optim import learning_rates

RESULTS = Path(__file__).parent / "results"
NUM_DATA = 50_000
LR = 1e-4
Step = Callable[[Tensor, Tensor], object]

CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "tiny MLP 8-16-4, batch 32": (lambda: mlp((8, 16, 4)), (8,), 4),
    "LeNet, batch 128": (lenet, (1, 28, 28), 10),
    "ResNet-18 (CIFAR stem, softplus), batch 16": (
        lambda: smooth_activations_(resnet18_cifar()),
        (3, 32, 32),
        10,
    ),
}


class NativeFisher(Fisher):
    """The default curvature with PyTorch's own second derivatives of convolutions and batch norms."""

    def recorder(self, used_values: Any) -> Any:
        return nullcontext()


PENALTIES = {
    "VL": Fisher,
    "VL, native second derivatives": NativeFisher,
    "VL, every 4": lambda: Fisher(every=4),
    "VL, every 8": lambda: Fisher(every=8),
    "VL, quarter": lambda: Fisher(fraction=0.25),
    "VL, quarter of every 4": lambda: Fisher(every=4, fraction=0.25),
}


def plain_map(make: Callable[[], nn.Module], device: str) -> Step:
    """MAP in plain torch: one Adam over all parameters, the prior as a sum of squares."""
    net = make().to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=LR)
    weights = [p for p in net.parameters() if p.dim() > 1]

    def step(x: Tensor, y: Tensor) -> object:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y, reduction="sum") * (NUM_DATA / len(x))
        loss = loss + 0.5 * sum((w * w).sum() for w in weights)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def svi_step(make: Callable[[], nn.Module], device: str, guide_of: Callable, loss: Any, name: str) -> Step:
    """Return a step of Pyro's SVI. Each contestant has a net of its own name, so that parameters stay apart."""
    model = classifier(to_bayesian_(make().to(device), prior_scale=fan_in), num_data=NUM_DATA)
    guide = guide_of(model)
    model._pyro_name, guide._pyro_name = f"model {name}", f"guide {name}"
    return SVI(model, guide, pyro.optim.Adam(learning_rates(LR)), loss).step


def contestants(make: Callable[[], nn.Module], device: str) -> dict[str, tuple[Step, int]]:
    """Name -> (step, steps per timed cycle)."""

    def delta(model: Any) -> Any:
        return AutoDelta(model, init_loc_fn=init_to_module)

    def normal(model: Any) -> Any:
        return AutoNormal(model, init_loc_fn=init_to_module, init_scale=0.01)

    entries = {
        "MAP (plain torch)": (plain_map(make, device), 1),
        "MAP (AutoDelta, Trace_ELBO)": (svi_step(make, device, delta, Trace_ELBO(), "map"), 1),
        "VI (AutoNormal, Trace_ELBO)": (svi_step(make, device, normal, Trace_ELBO(), "vi"), 1),
    }
    for name, curvature in PENALTIES.items():
        penalty = curvature()
        step = svi_step(make, device, MeanFieldGuide, TaylorELBO(curvature=penalty), name)
        entries[name] = (step, penalty.every)
    return entries


def measure(case: str, rounds: int, device: str) -> list[dict[str, Any]]:
    make, shape, classes = CASES[case]
    batch = int(case.rsplit(" ", 1)[1])
    torch.manual_seed(0)
    x, y = torch.randn(batch, *shape, device=device), torch.randint(classes, (batch,), device=device)
    steps = contestants(make, device)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_number in range(rounds + 2):
        for name, (step, cycle) in steps.items():
            start = time.perf_counter()
            for _ in range(cycle):
                step(x, y)
            if round_number >= 2:  # the first rounds create parameters and optimizer state
                times[name].append((time.perf_counter() - start) / cycle)
    pyro.clear_param_store()
    base = times["MAP (plain torch)"]
    return [
        {
            "case": case,
            "step": name,
            "median_ms": 1e3 * statistics.median(values),
            "ratio": statistics.median([t / b for t, b in zip(values, base, strict=True)]),
            "ratio_quartiles": statistics.quantiles([t / b for t, b in zip(values, base, strict=True)], n=4)[
                ::2
            ],
            "rounds": rounds,
        }
        for name, values in times.items()
    ]


def table(rows: list[dict[str, Any]], machine: str) -> str:
    lines = [
        f"Step times, interleaved; medians, with the quartiles of the paired ratios. {machine}.",
        "Over plain torch means over a MAP step without Pyro; over Pyro means over `AutoDelta` with `Trace_ELBO`.",
        "",
    ]
    header = "| step | ms | over MAP in plain torch | quartiles | over MAP in Pyro |"
    for case in dict.fromkeys(row["case"] for row in rows):
        in_pyro = next(r["median_ms"] for r in rows if r["case"] == case and "AutoDelta" in r["step"])
        lines += [f"**{case}**", "", header, "|---|---|---|---|---|"]
        for row in (r for r in rows if r["case"] == case):
            low, high = row["ratio_quartiles"]
            times = f"{row['median_ms']:.1f} | {row['ratio']:.2f} | {low:.2f} to {high:.2f}"
            lines.append(f"| {row['step']} | {times} | {row['median_ms'] / in_pyro:.2f} |")
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
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    for case in CASES:
        if options.cases is None or any(part.lower() in case.lower() for part in options.cases):
            rounds = options.rounds or {"tiny": 200, "LeNe": 60}.get(case[:4], 15)
            rows += measure(case, rounds, options.device)
            print(table(rows[-len(PENALTIES) - 3 :], case), flush=True)
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"{platform.machine()} CPU"
    machine = f"{where}, {options.threads} threads, torch {torch.__version__}, pyro {pyro.__version__}"
    name = "vl_speed_cuda" if options.device == "cuda" else "vl_speed"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))
    (RESULTS / f"{name}.md").write_text(table(rows, machine))


if __name__ == "__main__":
    main()
