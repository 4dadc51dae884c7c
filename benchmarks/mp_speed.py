# SPDX-License-Identifier: Apache-2.0
"""What does moment propagation cost? Time and memory relative to the deterministic network, in one interleaved run.

Three comparisons, each with its own plain contestant in torch alone:

- network: forward and backward of the network, as a sum over its outputs (their means and variances);
- prediction: forward without gradients;
- training: a whole step of SVI against a plain step (cross-entropy or squared error, backward, Adam), and against
  Pyro's AutoNormal with Trace_ELBO, which draws one sample of the weights.

All contestants see the same batch in turn (A B C A B C ...), and medians of the paired ratios are taken over rounds, so
that a drifting machine hits all alike. Peak memory is that of a process of its own for each, less what it needs to
import and to hold the batch and one plain network.

    python benchmarks/mp_speed.py                     # CPU
    python benchmarks/mp_speed.py --device cuda
"""

import argparse
import json
import platform
import resource
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
from pyro.infer.autoguide import AutoNormal
from torch import Tensor, nn

from pyro_dvi.bayesian import classifier, fan_in, init_to_module, regressor, to_bayesian_
from pyro_dvi.elbos import MomentPropagationELBO
from pyro_dvi.guides import MeanFieldGuide, MultiplicativeNoiseGuide
from pyro_dvi.moments import GaussianMoments, MultiplicativeMoments
from pyro_dvi.optim import learning_rates

RESULTS = Path(__file__).parent / "results"
NUM_DATA = 50_000
LR = 1e-4
Step = Callable[[], object]


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int  # 0: one real output
    batch: int
    rounds: int

    def data(self, device: str) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        x = torch.randn(self.batch, *self.shape, device=device)
        if self.classes == 0:
            return x, torch.randn(self.batch, device=device)
        return x, torch.randint(self.classes, (self.batch,), device=device)


CASES = {
    "MLP 13-50-1, batch 100": Case(lambda: mlp((13, 50, 1), nn.ReLU), (13,), 0, 100, 200),
    "LeNet with ReLU, batch 128": Case(lambda: lenet(activation=nn.ReLU), (1, 28, 28), 10, 128, 40),
    "ResNet-18 with CIFAR stem, batch 16": Case(resnet18_cifar, (3, 32, 32), 10, 16, 11),
}


# The network alone -------------------------------------------------------------------------------------------


class Uncertain(nn.Module):
    """A network whose linear and convolutional weights are moments made from parameters of its own."""

    def __init__(self, net: nn.Module, multiplicative: bool) -> None:
        super().__init__()
        self.net, self.multiplicative = net, multiplicative
        self.layers = [m for m in net.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
        self.locs, self.spreads = nn.ParameterList(), nn.ParameterList()
        for layer in self.layers:
            weight = layer.weight.detach()
            shape = (1, weight.shape[1], *[1] * (weight.dim() - 2)) if multiplicative else weight.shape
            del layer.weight
            self.locs.append(nn.Parameter(weight))
            self.spreads.append(nn.Parameter(weight.new_full(shape, 0.05 if multiplicative else 1e-3)))

    def forward(self, x: Tensor) -> GaussianMoments:
        kind = MultiplicativeMoments if self.multiplicative else GaussianMoments
        for layer, loc, spread in zip(self.layers, self.locs, self.spreads, strict=True):
            vars(layer)["weight"] = kind(loc, spread)
        return self.net(x)


def network(case: Case, kind: str, device: str) -> Step:
    net = case.make().to(device)
    net = net if kind == "plain" else Uncertain(net, kind == "MNVI").to(device)
    x, _ = case.data(device)

    def step() -> object:
        net.zero_grad()
        y = net(x)
        loss = y.sum() if kind == "plain" else y.loc.sum() + y.variance.sum()
        loss.backward()
        return loss.item()

    return step


def prediction(case: Case, kind: str, device: str) -> Step:
    net = case.make().to(device)
    net = (net if kind == "plain" else Uncertain(net, kind == "MNVI").to(device)).eval()
    x, _ = case.data(device)

    def step() -> object:
        with torch.no_grad():
            y = net(x)
            return y.sum().item() if kind == "plain" else y.variance.sum().item()

    return step


# Training ----------------------------------------------------------------------------------------------------


def training(case: Case, kind: str, device: str) -> Step:
    x, y = case.data(device)
    net = case.make().to(device)
    if kind == "plain":
        optimizer = torch.optim.Adam(net.parameters(), lr=LR)

        def step() -> object:
            optimizer.zero_grad()
            out = net(x)
            loss = nn.functional.cross_entropy(out, y) if case.classes else (out[:, 0] - y).square().mean()
            loss.backward()
            optimizer.step()
            return loss.item()

        return step
    bayesian = to_bayesian_(net, prior_scale=fan_in)
    model = (classifier if case.classes else regressor)(bayesian, num_data=NUM_DATA)
    loss: Any = MomentPropagationELBO()
    if kind == "MNVI":
        guide: Any = MultiplicativeNoiseGuide(model)
    elif kind == "MFVI":
        guide = MeanFieldGuide(model)
    else:
        guide = AutoNormal(model, init_loc_fn=init_to_module, init_scale=0.01)
        loss = Trace_ELBO()
    model._pyro_name, guide._pyro_name = f"model {kind}", f"guide {kind}"  # parameters stay apart
    svi = SVI(model, guide, pyro.optim.Adam(learning_rates(LR)), loss)
    return lambda: svi.step(x, y)


KINDS = {
    "network": (network, ("plain", "MNVI", "MFVI")),
    "prediction": (prediction, ("plain", "MNVI", "MFVI")),
    "training": (training, ("plain", "MNVI", "MFVI", "AutoNormal, Trace_ELBO")),
}


# Measuring ---------------------------------------------------------------------------------------------------


def times(name: str, what: str, rounds: int | None, device: str) -> list[dict[str, Any]]:
    case = CASES[name]
    make, kinds = KINDS[what]
    steps = {kind: make(case, kind, device) for kind in kinds}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for round_number in range((rounds or case.rounds) + 2):
        for kind, step in steps.items():
            start = time.perf_counter()
            step()
            if round_number >= 2:  # the first rounds create parameters and optimizer state
                seconds[kind].append(time.perf_counter() - start)
    pyro.clear_param_store()
    rows = []
    for kind, values in seconds.items():
        ratios = [t / base for t, base in zip(values, seconds["plain"], strict=True)]
        rows.append(
            {
                "case": name,
                "what": what,
                "kind": kind,
                "median_ms": 1e3 * statistics.median(values),
                "ratio": statistics.median(ratios),
                "ratio_quartiles": statistics.quantiles(ratios, n=4)[::2],
                "rounds": len(values),
            }
        )
    return rows


def peak() -> int:
    """Return the largest memory that this process has held, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # Linux, where getrusage counts what the parent held before the fork
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return 1024 * int(line.split()[1])
    scale = 1 if sys.platform == "darwin" else 1024
    return scale * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def memory_of(name: str, what: str, kind: str, device: str) -> float:
    """Return mebibytes above what is there before the contestant is; run in a process of its own."""
    case = CASES[name]
    net, batch = case.make().to(device), case.data(device)
    if device == "cuda":
        before = torch.cuda.memory_allocated()
    else:
        before = peak()
    step = KINDS[what][0](case, kind, device)
    for _ in range(3):
        step()
    after = torch.cuda.max_memory_allocated() if device == "cuda" else peak()
    del net, batch
    return (after - before) / 2**20


def memory(name: str, what: str, kind: str, device: str, threads: int) -> float:
    command = [sys.executable, __file__, "--device", device, "--threads", str(threads)]
    output = subprocess.run(
        [*command, "--memory-of", name, what, kind], capture_output=True, text=True, check=True
    )
    return float(output.stdout.strip().splitlines()[-1])


def table(rows: list[dict[str, Any]], machine: str) -> str:
    lines = [
        f"Moment propagation over the deterministic network, interleaved; medians and quartiles of the paired ratios. "
        f"{machine}.",
        "",
        "Memory: peak above a process that holds the batch and one plain network.",
        "",
    ]
    for name in dict.fromkeys(row["case"] for row in rows):
        lines += [f"**{name}**", "", "| | | ms | over plain | quartiles | MiB | over plain |"]
        lines.append("|---|---|---|---|---|---|---|")
        for row in (r for r in rows if r["case"] == name):
            low, high = row["ratio_quartiles"]
            plain = next(r for r in rows if (r["case"], r["what"], r["kind"]) == (name, row["what"], "plain"))
            mebibytes = "| | |"
            if row.get("mebibytes") is not None:
                mebibytes = (
                    f"| {row['mebibytes']:.0f} | {row['mebibytes'] / max(plain['mebibytes'], 1):.1f} |"
                )
            spread = f"{row['ratio']:.2f} | {low:.2f} to {high:.2f}"
            lines.append(f"| {row['what']} | {row['kind']} | {row['median_ms']:.2f} | {spread} {mebibytes}")
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
    parser.add_argument("--what", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--no-memory", action="store_true", help="times only")
    parser.add_argument("--memory-of", nargs=3, metavar=("CASE", "WHAT", "KIND"), help=argparse.SUPPRESS)
    parser.add_argument("--dry-run", action="store_true", help="print, but do not write results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory_of:
        print(memory_of(*options.memory_of, options.device))
        return
    rows = []
    for name in CASES:
        if options.cases is None or any(part.lower() in name.lower() for part in options.cases):
            for what in options.what:
                found = times(name, what, options.rounds, options.device)
                for row in found:
                    if not options.no_memory:
                        row["mebibytes"] = memory(name, what, row["kind"], options.device, options.threads)
                rows += found
            print(table([row for row in rows if row["case"] == name], name), flush=True)
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"{platform.machine()} CPU"
    machine = f"{where}, {options.threads} threads, torch {torch.__version__}, pyro {pyro.__version__}"
    if not options.dry_run:
        name = "mp_speed_cuda" if options.device == "cuda" else "mp_speed"
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))
        (RESULTS / f"{name}.md").write_text(table(rows, machine))


if __name__ == "__main__":
    main()
