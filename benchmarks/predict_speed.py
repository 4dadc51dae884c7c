# SPDX-License-Identifier: Apache-2.0
"""How long and how much memory do predictions take? ``predict`` with ``Samples`` beside ``pyro.infer.Predictive``.

Both average the class probabilities (the mean, for numbers) of the same number of draws from the same guide, a
mean-field Gaussian, over the same test inputs; ``Predictive`` reads them from a deterministic site of the model. It is
called in two ways: once with all inputs, and batch by batch with the batches of ``predict``, where it draws the weights
anew for each batch. ``predictor`` serves the same batches with draws that were taken when it was prepared, which is not
timed.

Contestants take turns (A B C A B C ...), and medians of the paired ratios are taken over rounds, so that a drifting
machine hits all alike. Differences between the averaged outputs are reported in Monte-Carlo standard errors. Peak
memory is that of a process of its own for each, above what it holds with model, guide and inputs (Linux or CUDA).

    python benchmarks/predict_speed.py                  # MNIST from PYRO_DVI_DATA, --data-dir, or a download
    python benchmarks/predict_speed.py --device cuda
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import Predictive
from pyro.nn import PyroModule
from torch import Tensor, nn

from benchmarks.shared.images import load_split
from benchmarks.shared.networks import lenet, mlp
from pyro_dvi import MeanFieldGuide, Samples, fan_in, predict, predictor, to_bayesian_
from pyro_dvi.predictive import Predictor

RESULTS = Path(__file__).parent / "results"
OURS, PREPARED = "predict, Samples", "predictor, Samples"
WHOLE, BATCHED = "Predictive, all inputs", "Predictive, in batches"
BATCH = 1000


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    classes: int  # 0: one real output
    features: int = 0  # 0: images of MNIST


CASES = {
    "LeNet with ReLU, MNIST": Case(lambda: lenet(activation=nn.ReLU), 10),
    "LeNet with softplus, MNIST": Case(lenet, 10),
    "MLP 784-200-200-10, MNIST": Case(lambda: mlp((784, 200, 200, 10), nn.ReLU), 10),
    "MLP 13-50-1, numbers": Case(lambda: mlp((13, 50, 1), nn.ReLU), 0, features=13),
}


class Model(PyroModule):
    """A network with a likelihood, and its probabilities as a site that ``Predictive`` can return."""

    def __init__(self, net: nn.Module, classes: int) -> None:
        super().__init__()
        self.net, self.classes = net, classes

    def forward(self, x: Tensor, y: Tensor | None = None) -> None:
        out = self.net(x)
        with pyro.plate("data", len(x)):
            if self.classes:
                pyro.deterministic("average", out.softmax(-1), event_dim=1)
                pyro.sample("obs", dist.Categorical(logits=out), obs=y)
            else:
                pyro.deterministic("average", out.squeeze(-1))
                pyro.sample("obs", dist.Normal(out.squeeze(-1), 0.5), obs=y)


@dataclass
class Setting:
    model: Model
    guide: MeanFieldGuide
    x: Tensor
    prepared: dict[tuple[int, int], Predictor] = field(default_factory=dict)


def setting(name: str, options: argparse.Namespace) -> Setting:
    """Return model, guide and inputs. The weights are not trained: it makes no difference to time and memory."""
    case = CASES[name]
    torch.manual_seed(0)
    if case.features:
        x = torch.randn(options.num_inputs, case.features)
    else:
        x = load_split("MNIST", 1, 1, options.num_inputs, 0, options.data_dir).test[0]
    x = x.to(options.device)
    model = Model(to_bayesian_(case.make(), prior_scale=fan_in), case.classes).to(options.device).eval()
    guide = MeanFieldGuide(model)
    y = torch.zeros(2, dtype=torch.long if case.classes else torch.float32, device=options.device)
    guide(x[:2], y)
    return Setting(model, guide.to(options.device), x)


def ours(s: Setting, num_samples: int, seed: int) -> Tensor:
    prediction = predict(s.model, s.guide, s.x, Samples(num_samples), batch_size=BATCH, seed=seed)
    return prediction.mean


def prepare(s: Setting, num_samples: int, seed: int) -> Predictor:
    key = num_samples, seed
    if key not in s.prepared:
        s.prepared[key] = predictor(s.model, s.guide, s.x[:2], Samples(num_samples), seed=seed)
    return s.prepared[key]


def served(s: Setting, num_samples: int, seed: int) -> Tensor:
    serve = prepare(s, num_samples, seed)
    return torch.cat([serve(x).mean for x in s.x.split(BATCH)])


@torch.no_grad()
def whole(s: Setting, num_samples: int, seed: int) -> Tensor:
    torch.manual_seed(seed)
    draws = Predictive(s.model, guide=s.guide, num_samples=num_samples, return_sites=["average"])
    return draws(s.x)["average"].mean(0)


@torch.no_grad()
def batched(s: Setting, num_samples: int, seed: int) -> Tensor:
    torch.manual_seed(seed)
    draws = Predictive(s.model, guide=s.guide, num_samples=num_samples, return_sites=["average"])
    return torch.cat([draws(x)["average"].mean(0) for x in s.x.split(BATCH)])


CONTESTANTS: dict[str, Callable[[Setting, int, int], Tensor]] = {
    OURS: ours,
    PREPARED: served,
    WHOLE: whole,
    BATCHED: batched,
}


def times(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    made = setting(name, options)
    seconds: dict[str, list[float]] = {kind: [] for kind in CONTESTANTS}
    outputs: dict[str, Tensor] = {}
    for run in CONTESTANTS.values():  # a first run loads kernels
        run(made, 2, 0)
    for round_number in range(options.rounds):
        prepare(made, options.num_samples, round_number)
        for kind, run in CONTESTANTS.items():
            start = time.perf_counter()
            outputs[kind] = run(made, options.num_samples, round_number)
            outputs[kind].sum().item()  # waits for an accelerator
            seconds[kind].append(time.perf_counter() - start)
    spread = predict(
        made.model, made.guide, made.x, Samples(options.num_samples), batch_size=BATCH, seed=0
    ).epistemic
    error = (2 * spread / options.num_samples).sqrt().clamp_min(1e-9)
    pyro.clear_param_store()
    return [
        {
            "case": name,
            "kind": kind,
            "seconds": statistics.median(values),
            "ratio": statistics.median(t / base for t, base in zip(values, seconds[OURS], strict=True)),
            "ratios": [t / base for t, base in zip(values, seconds[OURS], strict=True)],
            "difference": float(((outputs[kind] - outputs[OURS]) / error).square().mean().sqrt()),
            "largest_difference": float((outputs[kind] - outputs[OURS]).abs().max()),
        }
        for kind, values in seconds.items()
    ]


def held(field: str) -> int:
    """Return the memory of this process in bytes: "VmRSS" now, "VmHWM" at most since the peak was last forgotten."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def memory_of(name: str, kind: str, num_samples: int, options: argparse.Namespace) -> float:
    """Return mebibytes above what is there before the prediction; run in a process of its own."""
    made = setting(name, options)
    if kind == PREPARED:
        prepare(made, num_samples, 0)
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        CONTESTANTS[kind](made, num_samples, 0)
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak of reading the data
    before = held("VmRSS")
    CONTESTANTS[kind](made, num_samples, 0)
    return (held("VmHWM") - before) / 2**20


def memory(name: str, kind: str, num_samples: int, options: argparse.Namespace) -> float | None:
    command = [sys.executable, __file__, "--device", options.device, "--threads", str(options.threads)]
    command += ["--num-inputs", str(options.num_inputs)]
    if options.data_dir:
        command += ["--data-dir", options.data_dir]
    output = subprocess.run(
        [*command, "--memory-of", name, kind, str(num_samples)], capture_output=True, text=True
    )
    if output.returncode != 0:  # out of memory, say
        print(output.stderr[-500:], file=sys.stderr)
        return None
    return float(output.stdout.strip().splitlines()[-1])


def table(rows: list[dict[str, Any]], header: str) -> str:
    lines = [
        f"`predict` with `Samples` beside `pyro.infer.Predictive`, at equal output. {header}",
        "",
        "Over predict: median over rounds of the paired ratio of times, with its range; above 1, `predict` is the "
        "faster. Difference: of the averaged outputs from those of `predict`, root mean square in Monte-Carlo standard "
        "errors of a difference (about 1 if both are right). Memory: peak above a process that holds model, guide and "
        "inputs.",
        "",
        "| case | | s | over predict | range | difference | MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = min(row["ratios"]), max(row["ratios"])
        mebibytes = "" if row.get("mebibytes") is None else f"{row['mebibytes']:.0f}"
        lines.append(
            f"| {row['case']} | {row['kind']} | {row['seconds']:.2f} | {row['ratio']:.2f} | {low:.2f} to {high:.2f} "
            f"| {row['difference']:.2f} | {mebibytes} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-samples", type=int, default=30, help="draws when times are compared")
    parser.add_argument("--num-inputs", type=int, default=10_000)
    parser.add_argument("--big", type=int, default=1000, help="draws when memory is measured; 0: no memory")
    parser.add_argument("--cases", nargs="+", help="parts of case names")
    parser.add_argument(
        "--data-dir", help="folder with MNIST/raw/*.gz (default: PYRO_DVI_DATA or a download)"
    )
    parser.add_argument("--memory-of", nargs=3, metavar=("CASE", "KIND", "DRAWS"), help=argparse.SUPPRESS)
    parser.add_argument("--dry-run", action="store_true", help="print, but do not write results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory_of:
        name, kind, draws = options.memory_of
        print(memory_of(name, kind, int(draws), options))
        return
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"{platform.machine()} CPU"
    machine = f"{where}, {options.threads} threads, torch {torch.__version__}, pyro {pyro.__version__}"
    header = (
        f"{options.num_inputs:,} inputs in batches of {BATCH:,}; times of {options.num_samples:,} draws, "
        f"{options.rounds} rounds; memory of {options.big:,} draws (of {options.num_samples:,} for `Predictive`, which "
        f"keeps them all). {machine}."
    )
    cases = [
        name
        for name in CASES
        if options.cases is None or any(part.lower() in name.lower() for part in options.cases)
    ]
    rows = [row for name in cases for row in times(name, options)]
    print(table(rows, header), flush=True)  # before memory, which takes longer
    if options.big:
        for row in rows:
            draws = options.big if row["kind"] == OURS else options.num_samples
            row["draws_of_memory"] = draws
            row["mebibytes"] = memory(row["case"], row["kind"], draws, options)
        print(table(rows, header), flush=True)
    if not options.dry_run:
        stem = "predict_speed_cuda" if options.device == "cuda" else "predict_speed"
        RESULTS.mkdir(exist_ok=True)
        settings = {
            key: value for key, value in vars(options).items() if key not in ("data_dir", "memory_of")
        }
        result = {"machine": machine, "settings": settings, "rows": rows}
        (RESULTS / f"{stem}.json").write_text(json.dumps(result, indent=1) + "\n")
        (RESULTS / f"{stem}.md").write_text(table(rows, header))


if __name__ == "__main__":
    main()
