# SPDX-License-Identifier: Apache-2.0
"""What the first call does to a network that is already trained: its log score before and after ``dvi.Laplace``.

Networks are trained with torch's Adam, at a small and a large step size (the second leads to networks that are too sure
of themselves), and no data are held out. The last layer gets a Gaussian. Compared are the network itself, the Gaussian
with the prior N(0, 1), the prior scale that maximises the evidence, and the scale that ``dvi.Laplace()`` chooses;
beside them, laplace-torch with its own choice. In the last column, the scale is the best one for the test data, which
no method can know.
"""

import copy
import math
import time
import warnings
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torchvision
from sklearn import datasets
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_dvi as dvi
from benchmarks.shared import regressions
from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings
from benchmarks.shared.images import load_split
from benchmarks.shared.networks import mlp
from benchmarks.shared.tables import paired, provenance, table
from pyro_dvi.errors import DviWarning
from pyro_dvi.laplace import ByEvidence, ByValidation, NoiseScale, PriorPrecision

EPOCHS, BATCH_SIZE, SEEDS, STEP_SIZES = 40, 64, 3, (1e-3, 1e-2)
CLASSES = ("wine", "cancer", "iris", "moons", "digits", "digits, conv", "MNIST, 500", "Fashion-MNIST, 2,000")
LARGE = ("CIFAR-10, ResNet-18", "1,000 classes")  # ten epochs; 1,000 images; two examples of a class
REGRESSIONS = ("diabetes", "boston", "concrete", "energy", "yacht")
COLUMNS = ("network", "prior scale 1", "evidence", "dvi.Laplace()", "laplace-torch", "best for the test data")
Pair = tuple[Tensor, Tensor]


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """Each task, step size and seed."""
    tasks = (*CLASSES, *LARGE, *REGRESSIONS)
    return [{"task": t, "lr": lr, "seed": s} for t in tasks for lr in STEP_SIZES for s in range(SEEDS)]


def data(task: str, seed: int, data_dir: str | None) -> tuple[Pair, Pair]:
    """Training and test data; inputs and targets are standardised."""
    if task == "CIFAR-10, ResNet-18":
        parts = load_split("CIFAR10", 1000, 1, 500, seed, data_dir)
        return parts.train, parts.test
    if task == "1,000 classes":
        random = torch.Generator().manual_seed(seed)
        y = torch.arange(1000).repeat(2)[torch.randperm(2000, generator=random)]
        x = torch.randn(1000, 32, generator=random)[y] + 0.5 * torch.randn(2000, 32, generator=random)
        return (x[200:], y[200:]), (x[:200], y[:200])
    if "MNIST" in task:
        name, count = task.split(", ", 1)
        size = int(count.replace(",", ""))
        parts = load_split(name.replace("-", ""), size, 1, 2000, seed, data_dir)
        return (parts.train[0].flatten(1), parts.train[1]), (parts.test[0].flatten(1), parts.test[1])
    if task == "moons":
        x, y = map(torch.tensor, datasets.make_moons(600, noise=0.3, random_state=seed))
    elif task in ("boston", "concrete", "energy", "yacht"):
        x, y = regressions.load(task, data_dir)
    else:
        name = {"cancer": "breast_cancer"}.get(task, task.split(",")[0])
        x, y = map(torch.tensor, getattr(datasets, f"load_{name}")(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    test, train = order.split([len(x) // 4, len(x) - len(x) // 4])
    x = x / 16 if "digits" in task else (x - x[train].mean(0)) / x[train].std(0).clamp(min=1e-9)
    x = x.float().reshape(-1, 1, 8, 8) if "conv" in task else x.float()
    if task in REGRESSIONS:
        y = ((y - y[train].mean()) / y[train].std()).float().unsqueeze(-1)
    return (x[train], y[train]), (x[test], y[test])


def network(task: str, x: Tensor, y: Tensor) -> nn.Module:
    """An untrained network."""
    outputs = 1 if task in REGRESSIONS else int(y.max()) + 1
    if "ResNet" in task:
        return torchvision.models.resnet18(num_classes=10)
    if "conv" not in task:
        return mlp((x[0].numel(), 50, 50, outputs), nn.ReLU)
    first = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)
    second = nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(128, outputs))


def trained(task: str, lr: float, seed: int, x: Tensor, y: Tensor) -> nn.Module:
    """A network after ordinary training, in evaluation mode."""
    torch.manual_seed(seed)
    net = network(task, x, y)
    loss = nn.functional.mse_loss if task in REGRESSIONS else nn.functional.cross_entropy
    adam = torch.optim.Adam(net.parameters(), lr, weight_decay=1e-4 if task in REGRESSIONS else 0.0)
    for _ in range(10 if task in LARGE else EPOCHS):
        for rows in torch.randperm(len(x)).split(BATCH_SIZE):
            if len(rows) > 1:  # batch norm needs two
                adam.zero_grad()
                loss(net(x[rows]), y[rows]).backward()
                adam.step()
    return net.eval()


def run(settings: Settings, data_dir: str | None) -> Row:
    """The mean negative log density of the test data in each way, and seconds of the two libraries."""
    warnings.simplefilter("ignore", DviWarning)
    (x, y), test = data(settings["task"], settings["seed"], data_dir)
    net = trained(settings["task"], settings["lr"], settings["seed"], x, y)
    loader = DataLoader(TensorDataset(x, y), 128)
    calls: list[int] = []
    hook = net.register_forward_hook(lambda *_: calls.append(1))
    start = time.process_time()
    ours = dvi.Laplace().fit(net, loader, progress=False)
    found = {"dvi.Laplace()": ours.predict(test).metrics()["nll"], "seconds": time.process_time() - start}
    passes = len(calls) / len(loader)
    hook.remove()
    found["network"] = ours.predict(test, dvi.AtMean()).metrics()["nll"]
    if settings["task"] in REGRESSIONS:  # with the residuals' noise
        noise = float((net(x) - y).square().mean().sqrt().detach())
        errors = (net(test[0]) - test[1]).square().mean().item()
        found["network"] = 0.5 * math.log(2 * math.pi * noise**2) + 0.5 * errors / noise**2
    fixed = partial(dvi.Laplace, prior_scale=1.0)
    plain = fixed(noise_scale=noise) if settings["task"] in REGRESSIONS else fixed()
    posterior = plain.fit(net, loader, progress=False)
    found["prior scale 1"] = posterior.predict(test).metrics()["nll"]
    ways: dict[str, Any] = {"evidence": ByEvidence(), "best for the test data": ByValidation([test])}
    for name, criterion in ways.items():
        scales = [PriorPrecision(), *([NoiseScale()] if settings["task"] in REGRESSIONS else [])]
        with posterior.in_store():
            posterior.guide.scale_factors = {}
            posterior.guide.tune(loader, scales, criterion, unconverged="accept", progress=False)
        found[name] = posterior.predict(test).metrics()["nll"]
    return {**found, **_peer(settings["task"], net, loader, test), "passes": passes}


def _peer(task: str, net: nn.Module, loader: Any, test: Pair) -> Row:
    """The score of laplace-torch, whose scales maximise the evidence, and its seconds; empty if it is not there."""
    if find_spec("laplace") is None:
        return {}
    from laplace import Laplace

    kind = "regression" if task in REGRESSIONS else "classification"
    structure = "kron" if task in LARGE else "full"
    start = time.process_time()
    la: Any = Laplace(copy.deepcopy(net), kind, subset_of_weights="last_layer", hessian_structure=structure)
    la.fit(loader)
    if task in REGRESSIONS:
        log_prior, log_noise = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
        adam = torch.optim.Adam([log_prior, log_noise], lr=0.1)
        for _ in range(100):  # as in its documentation
            adam.zero_grad()
            (-la.log_marginal_likelihood(log_prior.exp(), log_noise.exp())).backward()
            adam.step()
        mean_, variance = la(test[0])
        variance = variance.squeeze(-1) + la.sigma_noise.detach() ** 2
        nll = -torch.distributions.Normal(mean_, variance.sqrt()).log_prob(test[1]).mean()
    else:
        la.optimize_prior_precision(method="marglik")
        # For 1,000 classes, its Jacobians of a few rows fill the memory.
        parts = test[0].split(1 if task == "1,000 classes" else len(test[0]))
        found = torch.cat([la(part, link_approx="probit") for part in parts])
        nll = nn.functional.nll_loss(found.log(), test[1])
    return {"laplace-torch": float(nll.detach()), "peer_seconds": time.process_time() - start}


def report(rows: list[Row], folder: Path) -> str:
    """A table of log scores, and one of differences from the network."""

    def line(task: str, lr: float) -> list[str]:
        runs = [row for row in rows if (row["task"], row["lr"]) == (task, lr)]
        cells = [
            f"{mean(r[name] for r in runs):.3f}" if all(name in r for r in runs) else "" for name in COLUMNS
        ]
        change = paired([r["dvi.Laplace()"] for r in runs], [r["network"] for r in runs])
        ratios = [r["seconds"] / r["peer_seconds"] for r in runs if "peer_seconds" in r]
        speed = f"{median(ratios):.2f}" if ratios else ""
        return [f"{task}, {lr:g}", *cells, str(change), speed, f"{mean(r['passes'] for r in runs):.1f}"]

    tasks = [task for task in (*CLASSES, *LARGE, *REGRESSIONS) if any(row["task"] == task for row in rows)]
    header = ["task, step size", *COLUMNS, "dvi.Laplace() less network", "time / laplace-torch", "passes"]
    return (
        f"# The first call: a trained network before and after\n\n{provenance('laplace_first_call', rows)} Mean "
        f"negative log density of test data (nats, lower is better), {SEEDS} seeds; differences are paired, ± half a "
        "95 % interval of their mean, bold where it leaves out zero. The last layer is uncertain. Regressions also "
        "choose the noise; *network* has the noise of the training residuals. Time: fit, choice of scales and "
        "prediction of the test data, processor time. Passes: runs of the network over the training data, in "
        f"batches.\n\n{table(header, [line(task, lr) for task in tasks for lr in STEP_SIZES])}"
    )


BENCHMARK = Benchmark(
    "laplace_first_call",
    "Does one call harm a network that is trained already?",
    plan,
    run,
    report,
    timed=True,
)
