# SPDX-License-Identifier: Apache-2.0
"""Laplace approximations of small classifiers of handwritten digits, and the full matrix of laplace-torch.

One trained mode for each network and seed; every method starts from its weights, tunes the precision of the prior (by
evidence or by validation likelihood) and predicts test digits and inputs from elsewhere. Each run has a process and a
thread of its own. Structures that both libraries have are compared by laplace_torch.py.

    python benchmarks/laplace_quality.py                       # hours: the peer's full matrix takes most of it
    python benchmarks/laplace_quality.py --networks cnn --seeds 0 --time-limit 120  # rows that take longer are cut
    python benchmarks/laplace_quality.py --tuning validation --seeds 0 --time-limit 120
    python benchmarks/laplace_quality.py --report    # only rewrite the table

The peer is no dependency: install ``laplace-torch`` into an environment of its own together with this project. Without
it, its rows are left out. Finished runs are lines of results/laplace_quality.jsonl and are not repeated; a run that
was cut is a line too, which says after how long, and is repeated under a longer limit.
"""

import argparse
import importlib.util
import json
import math
import multiprocessing
import os
import platform
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from resource import RLIMIT_CPU, RUSAGE_SELF, getrusage, setrlimit
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_dvi
from benchmarks.laplace_quality_report import write_report
from pyro_dvi.bayesian import classifier, to_bayesian_
from pyro_dvi.laplace import (
    ByEvidence,
    ByValidation,
    Dense,
    Diagonal,
    KroneckerFactored,
    PosteriorSamples,
    TopEigen,
)
from pyro_dvi.metrics import accuracy, auroc, expected_calibration_error, nll, predictive_entropy

RESULTS = Path(__file__).parent / "results" / "laplace_quality.jsonl"
NUM_TRAIN, NUM_VALIDATION, BATCH_SIZE = 1000, 297, 250
DECADES, GRID = (-2, 4), 13  # of the prior precision, for validation
PEER_FULL_STEPS, PEER_FULL_RATE = 10, 0.5  # instead of its 100 steps of 0.1, each of which is a determinant
LAST_LAYER = {"mlp": "net.2.*", "cnn": "net.5.*"}
OURS: dict[str, Any] = {
    "PosteriorSamples(64)": PosteriorSamples(64),
    "PosteriorSamples(256)": PosteriorSamples(256),
    "Dense": Dense(),
    "KroneckerFactored": KroneckerFactored(),
    "Diagonal": Diagonal(),
    "last layer, Dense": Dense(),
    "TopEigen(300)": TopEigen(300),
}
PEER_FULL = "laplace-torch full"  # by evidence only: a grid would take a fit and a determinant for each value


@dataclass(frozen=True)
class Run:
    """One row of the results; every field takes part in its identity."""

    network: str
    seed: int
    method: str
    tuning: str


def build(network: str) -> nn.Sequential:
    """Return an untrained network."""
    if network == "mlp":
        return nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    first, second = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(256, 10))


def digits(network: str, seed: int) -> dict[str, Any]:
    """Return the splits of a seed, and inputs that are no upright digits."""
    data = load_digits()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(data.target), generator=generator)
    x = torch.tensor(data.images, dtype=torch.float32)[order].unsqueeze(1) / 16
    y = torch.tensor(data.target)[order]
    cuts = [NUM_TRAIN, NUM_VALIDATION, len(y) - NUM_TRAIN - NUM_VALIDATION]
    (train, validation, test), labels = x.split(cuts), y.split(cuts)
    pixels = torch.randperm(64, generator=generator)
    foreign = {
        "noise": torch.rand(test.shape, generator=generator),
        "permuted": test.flatten(1)[:, pixels].reshape(test.shape),
        "rotated": test.rot90(1, (2, 3)),
    }
    shaped = (lambda v: v.flatten(1)) if network == "mlp" else (lambda v: v)
    sets = {"train": train, "validation": validation, "test": test, **foreign}
    return {**{name: shaped(v).contiguous() for name, v in sets.items()}, "labels": labels}


def train(network: str, seed: int) -> dict[str, Any]:
    """Return the weights of a network at its mode under standard normal priors."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    data, net = digits(network, seed), build(network)
    loader = DataLoader(TensorDataset(data["train"], data["labels"][0]), BATCH_SIZE, shuffle=True)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    epochs = 200
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            squares = sum(p.square().sum() for p in net.parameters())
            (nn.functional.cross_entropy(net(x), y) + 0.5 * squares / NUM_TRAIN).backward()
            optimizer.step()
        schedule.step()
    return {name: v.numpy() for name, v in net.state_dict().items()}  # tensors would be gone with the process


class Clock:
    """Seconds of named phases, by the processor and by the wall."""

    def __init__(self) -> None:
        self.cpu: dict[str, float] = {}
        self.wall: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        cpu, wall = time.process_time(), time.perf_counter()
        yield
        self.cpu[name] = time.process_time() - cpu
        self.wall[name] = time.perf_counter() - wall


def ours(run: Run, net: nn.Module, data: dict[str, Any], clock: Clock) -> tuple[dict[str, Tensor], float]:
    """Tune, fit and predict with this library; return probabilities by set, and the precision."""
    loader = DataLoader(TensorDataset(data["train"], data["labels"][0]), BATCH_SIZE)
    model = classifier(to_bayesian_(net, prior_scale=1.0), num_data=NUM_TRAIN)
    guide = pyro_dvi.LaplaceGuide(model)
    guide.initialize(data["train"][:2], data["labels"][0][:2])
    options: dict[str, Any] = {"criterion": ByEvidence()}
    if run.tuning == "validation":
        held_out = [(data["validation"], data["labels"][1])]
        values = torch.logspace(*DECADES, GRID)
        options = {"criterion": ByValidation(held_out), "values": values, "refinements": 0}
    subset = LAST_LAYER[run.network] if run.method.startswith("last") else None
    with clock.phase("fit and tune"):
        curve = guide.tune(
            loader, method=OURS[run.method], subset=subset, seed=run.seed, progress=False, **options
        )
    with clock.phase("predict"):
        found = {name: pyro_dvi.predict(model, guide, data[name]).probabilities for name in _predicted()}
    return found, curve.best


def peer(run: Run, net: nn.Module, data: dict[str, Any], clock: Clock) -> tuple[dict[str, Tensor], float]:
    """The same with laplace-torch; for convolutions with the fastest of its backends. By evidence only."""
    from laplace import Laplace
    from laplace.curvature import BackPackGGN

    loader = DataLoader(TensorDataset(data["train"], data["labels"][0]), BATCH_SIZE)
    backend = {"backend": BackPackGGN} if run.network == "cnn" else {}
    with clock.phase("fit and tune"):
        la = Laplace(net, "classification", subset_of_weights="all", hessian_structure="full", **backend)
        la.fit(loader)
        la.optimize_prior_precision(
            method="marglik", prior_structure="scalar", n_steps=PEER_FULL_STEPS, lr=PEER_FULL_RATE
        )
    with clock.phase("predict"):
        found = {
            name: torch.cat(
                [la(x, pred_type="glm", link_approx="probit").detach() for x in data[name].split(BATCH_SIZE)]
            )
            for name in _predicted()
        }
    return found, float(la.prior_precision)


def _predicted() -> tuple[str, ...]:
    return ("test", "noise", "permuted", "rotated")


def measure(arguments: tuple[Run, dict[str, Any]]) -> dict[str, Any]:
    """Return one line of the results."""
    run, weights = arguments
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    warnings.simplefilter("ignore")  # values at the edge of the grid show in the table
    data, net, clock = digits(run.network, run.seed), build(run.network), Clock()
    net.load_state_dict({name: torch.from_numpy(v) for name, v in weights.items()})
    net.eval()
    before = _resident()
    precision = 1.0
    if run.method == "MAP":
        with clock.phase("predict"), torch.no_grad():
            found = {name: net(data[name]).softmax(-1) for name in _predicted()}
    else:
        measured = peer if run.method == PEER_FULL else ours
        found, precision = measured(run, net, data, clock)
    peak = getrusage(RUSAGE_SELF).ru_maxrss / 1024
    return {
        **asdict(run),
        "precision": precision,
        **scores(found, data["labels"][2]),
        "cpu_seconds": clock.cpu,
        "wall_seconds": clock.wall,
        "memory_mib": max(0.0, peak - before),
        "load": os.getloadavg()[0],
        "machine": f"{platform.machine()}, torch {torch.__version__}",
    }


def scores(found: dict[str, Tensor], labels: Tensor) -> dict[str, float]:
    """Scores of the test digits, and how well entropy tells them from foreign inputs."""
    found = {name: p.double() / p.double().sum(-1, keepdim=True) for name, p in found.items()}
    inside = predictive_entropy(found["test"])
    return {
        "nll": float(nll(found["test"].log().gather(1, labels[:, None])[:, 0]).value),
        "ece": float(expected_calibration_error(found["test"], labels)),
        "accuracy": float(accuracy(found["test"], labels)),
        **{
            f"auroc_{name}": float(auroc(inside, predictive_entropy(found[name])))
            for name in _predicted()[1:]
        },
    }


def _resident() -> float:
    """Resident memory in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", nargs="+", default=["mlp", "cnn"], choices=["mlp", "cnn"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", default=["MAP", *OURS, PEER_FULL])
    parser.add_argument("--tuning", nargs="+", default=["evidence", "validation"])
    parser.add_argument("--time-limit", type=float, default=math.inf, help="processor seconds of a run")
    parser.add_argument("--report", action="store_true")
    arguments = parser.parse_args()
    if not arguments.report:
        methods = arguments.methods
        if importlib.util.find_spec("laplace") is None:
            print("laplace-torch is not installed (see the docstring): its rows are left out")
            methods = [m for m in methods if m != PEER_FULL]
        run_all(arguments, methods)
    write_report(RESULTS)


def run_all(arguments: argparse.Namespace, methods: list[str]) -> None:
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    done = {
        Run(**{k: row[k] for k in Run.__annotations__})
        for row in rows
        if row.get("stopped_after", math.inf) >= arguments.time_limit
    }
    for seed in arguments.seeds:
        for network in arguments.networks:
            runs = [
                Run(network, seed, method, tuning)
                for method in methods
                for tuning in (["none"] if method == "MAP" else arguments.tuning)
                if not (tuning == "validation" and method == PEER_FULL)
            ]
            runs = [run for run in runs if run not in done]
            if not runs:
                continue
            with multiprocessing.get_context("fork").Pool(1) as pool:
                weights = pool.apply(train, (network, seed))
            for run in runs:
                row = limited(run, weights, arguments.time_limit)
                keep(row)
                shown = ("network", "seed", "method", "tuning", "nll", "cpu_seconds", "stopped_after")
                print({k: row[k] for k in shown if k in row}, flush=True)


def limited(run: Run, weights: dict[str, Any], limit: float) -> dict[str, Any]:
    """Return the line of a run in a process of its own, or one that says after how much processor time it was cut."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        if not math.isinf(limit):
            setrlimit(RLIMIT_CPU, (math.ceil(limit), math.ceil(limit) + 1))
        sender.send(measure((run, weights)))

    process = context.Process(target=work)
    process.start()
    sender.close()
    try:
        row: dict[str, Any] = receiver.recv()
    except EOFError:
        row = {**asdict(run), "stopped_after": math.ceil(limit)}
    process.join()
    if "stopped_after" in row and process.exitcode not in (-signal.SIGXCPU, -signal.SIGKILL):
        raise SystemExit(f"{run} ended without a result, see above")
    return row


def keep(row: dict[str, Any]) -> None:
    """Add a line to the results, in the place of one that was cut before."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    names = list(Run.__annotations__)
    others = [line for line in lines if any(json.loads(line)[k] != row[k] for k in names)]
    RESULTS.write_text("\n".join([*others, json.dumps(row)]) + "\n")


if __name__ == "__main__":
    main()
