# SPDX-License-Identifier: Apache-2.0
"""Laplace approximations of small classifiers of handwritten digits, and the full matrix of laplace-torch.

Every run trains the network of its seed, tunes the precision of the prior (by evidence or by validation likelihood) and
predicts test digits and inputs from elsewhere. Structures that both libraries have are compared by peer.py.
"""

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_dvi
from benchmarks.laplace.digits_report import FOREIGN, PEER_FULL, report
from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings
from benchmarks.shared.memory import peak_growth
from pyro_dvi.bayesian import classifier, to_bayesian_
from pyro_dvi.laplace import (
    ByEvidence,
    ByValidation,
    Dense,
    Diagonal,
    KroneckerFactored,
    PosteriorSamples,
)
from pyro_dvi.predictive.metrics import accuracy, auroc, expected_calibration_error, nll

NUM_TRAIN, NUM_VALIDATION, BATCH_SIZE, EPOCHS = 1000, 297, 250, 200
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
}


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """All of ours; the peer's full matrix, by evidence only, takes minutes for one network and hours for all."""
    runs = []
    for seed in range(3):
        for network in ("mlp", "cnn"):
            common = {"network": network, "seed": seed}
            runs.append({**common, "method": "MAP", "tuning": "none"})
            for tuning in ("evidence", "validation"):
                runs += [{**common, "method": method, "tuning": tuning} for method in OURS]
            if budget == "gpu" or (network, seed) == ("mlp", 0):
                runs.append({**common, "method": PEER_FULL, "tuning": "evidence"})
    return runs


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


def trained(network: str, data: dict[str, Any]) -> nn.Sequential:
    """Return a network at its mode under standard normal priors."""
    net = build(network)
    loader = DataLoader(TensorDataset(data["train"], data["labels"][0]), BATCH_SIZE, shuffle=True)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            squares = sum(p.square().sum() for p in net.parameters())
            (nn.functional.cross_entropy(net(x), y) + 0.5 * squares / NUM_TRAIN).backward()
            optimizer.step()
        schedule.step()
    return net.eval()


class Clock(dict[str, float]):
    """Seconds of processor time of named phases."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block."""
        start = time.process_time()
        yield
        self[name] = time.process_time() - start


def ours(settings: Settings, net: nn.Module, data: dict[str, Any], clock: Clock) -> tuple[Any, float]:
    """Tune, fit and predict with this library; return probabilities by set, and the precision."""
    loader = DataLoader(TensorDataset(data["train"], data["labels"][0]), BATCH_SIZE)
    model = classifier(to_bayesian_(net, prior_scale=1.0), num_data=NUM_TRAIN)
    guide = pyro_dvi.LaplaceGuide(model)
    guide.initialize(data["train"][:2], data["labels"][0][:2])
    options: dict[str, Any] = {"criterion": ByEvidence()}
    if settings["tuning"] == "validation":
        held_out = [(data["validation"], data["labels"][1])]
        values = torch.logspace(*DECADES, GRID)
        options = {"criterion": ByValidation(held_out), "values": values, "refinements": 0}
    method, seed = settings["method"], settings["seed"]
    subset = LAST_LAYER[settings["network"]] if method.startswith("last") else None
    with clock.phase("fit and tune"):
        curve = guide.tune(loader, method=OURS[method], subset=subset, seed=seed, progress=False, **options)
    with clock.phase("predict"):
        found = {name: pyro_dvi.predict(model, guide, data[name]).probabilities for name in _predicted()}
    return found, curve.best


def peer(settings: Settings, net: nn.Module, data: dict[str, Any], clock: Clock) -> tuple[Any, float]:
    """The same with laplace-torch; for convolutions with the fastest of its backends. By evidence only."""
    from laplace import Laplace
    from laplace.curvature import BackPackGGN

    loader = DataLoader(TensorDataset(data["train"], data["labels"][0]), BATCH_SIZE)
    backend = {"backend": BackPackGGN} if settings["network"] == "cnn" else {}
    with clock.phase("fit and tune"):
        la = Laplace(net, "classification", subset_of_weights="all", hessian_structure="full", **backend)
        la.fit(loader)
        la.optimize_prior_precision(
            method="marglik", prior_structure="scalar", n_steps=PEER_FULL_STEPS, lr=PEER_FULL_RATE
        )

    def predicted(x: Tensor) -> Tensor:
        return la(x, pred_type="glm", link_approx="probit").detach()

    with clock.phase("predict"):
        found = {
            name: torch.cat([predicted(x) for x in data[name].split(BATCH_SIZE)]) for name in _predicted()
        }
    return found, float(la.prior_precision)


def _predicted() -> tuple[str, ...]:
    return ("test", *FOREIGN)


def run(settings: Settings, data_dir: str | None) -> Row:
    """Train, fit and predict."""
    warnings.simplefilter("ignore")  # values at the edge of the grid show in the table
    data, clock = digits(settings["network"], settings["seed"]), Clock()
    net, precision = trained(settings["network"], data), 1.0
    with peak_growth() as memory:
        if settings["method"] == "MAP":
            with clock.phase("predict"), torch.no_grad():
                found = {name: net(data[name]).softmax(-1) for name in _predicted()}
        else:
            measured = peer if settings["method"] == PEER_FULL else ours
            found, precision = measured(settings, net, data, clock)
    return {"precision": precision, **scores(found, data["labels"][2]), "seconds": clock, **memory}


def scores(found: dict[str, Tensor], labels: Tensor) -> dict[str, float]:
    """Scores of the test digits, and how well entropy tells them from foreign inputs."""
    found = {name: p.double() / p.double().sum(-1, keepdim=True) for name, p in found.items()}
    entropy = {name: torch.special.entr(p).sum(-1) for name, p in found.items()}
    outside = {name: float(auroc(entropy["test"], entropy[name])) for name in FOREIGN}
    return {
        "nll": float(nll(found["test"].log().gather(1, labels[:, None])[:, 0]).value),
        "ece": float(expected_calibration_error(found["test"], labels)),
        "accuracy": float(accuracy(found["test"], labels)),
        **{f"auroc_{name}": value for name, value in outside.items()},
    }


BENCHMARK = Benchmark(
    "laplace_quality",
    "How good is each Laplace approximation of a digits classifier, tuned with evidence or validation data?",
    plan,
    run,
    report,
    timed=True,
)
