# SPDX-License-Identifier: Apache-2.0
"""Uncertainty over some weights of a network beside that over all of them: which weights, and how many.

A 64-20-10 tanh network on scikit-learn's digits (1,510 weights, standard normal priors) is trained to its mode; then a
dense Gauss-Newton matrix is fitted over all weights, over the last layer, and over subnetworks, chosen at random or by
the largest variances of a diagonal fit. Predictions are compared with those of all weights.
"""

import warnings
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import pyro_dvi as dvi
from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings
from benchmarks.shared.tables import provenance, table
from pyro_dvi.laplace import ByValidation, Dense, Diagonal, LaplaceGuide, largest_variance
from pyro_dvi.predictive.metrics import auroc

SIZES, STEPS = (100, 300, 600), 2000
PRECISIONS = [10.0**k for k in (-1, -0.5, 0, 0.5, 1, 1.5, 2)]
SCORES = {
    "sd": "sd of logits, relative",
    "rank": "rank correlation",
    "nll": "NLL",
    "tuned_nll": "NLL, tuned prior",
    "auroc": "AUROC, rotated",
}


def digits(seed: int) -> dict[str, tuple[Tensor, ...]]:
    """Return training, validation and test digits, and the test digits turned by a right angle."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(seed))
    images, y = torch.tensor(data.images)[order] / 16, torch.tensor(data.target)[order]
    x, turned = images.flatten(1), images.rot90(1, (1, 2)).flatten(1)
    parts = {"train": slice(0, 1000), "validation": slice(1000, 1297), "test": slice(1297, 1797)}
    return {**{name: (x[part], y[part]) for name, part in parts.items()}, "turned": (turned[parts["test"]],)}


def trained(data: tuple[Tensor, ...]) -> tuple[Any, LaplaceGuide]:
    """Return model and guide at the mode."""
    net = nn.Sequential(nn.Linear(64, 20), nn.Tanh(), nn.Linear(20, 10)).double()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(data[0]), data[1], reduction="sum")
        (loss + 0.5 * sum(p.square().sum() for p in net.parameters())).backward()
        optimizer.step()
        schedule.step()
    model = dvi.classifier(dvi.to_bayesian_(net, prior_scale=1.0), num_data=len(data[0]))
    return model, LaplaceGuide(model)


def subsets(guide: LaplaceGuide, batches: list, seed: int) -> dict[str, Any]:
    """Return what is uncertain, by name."""
    guide.fit(batches, Diagonal())
    chosen: dict[str, Any] = {"all weights": None, "last layer": "*2.*"}
    everything = guide.fitted.layout
    order = torch.randperm(everything.size, generator=torch.Generator().manual_seed(seed))
    for size in SIZES:
        chosen[f"largest variance, {size}"] = largest_variance(guide, size)
        flat = torch.zeros(everything.size, dtype=torch.bool)
        flat[order[:size]] = True
        chosen[f"random, {size}"] = everything.place(everything.split(flat))
    return chosen


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """A network for each seed."""
    return [{"seed": seed} for seed in range(3 if budget == "small" else 20)]


def run(settings: Settings, data_dir: str | None) -> Row:
    """Return the scores of each subset."""
    data = digits(settings["seed"])
    batches, (x, y) = [data["train"]], data["test"]
    model, guide = trained(data["train"])
    found: dict[str, dict[str, float | None]] = {}
    full = torch.empty(0)
    for name, subset in subsets(guide, batches, settings["seed"]).items():
        guide.scale_factors = {}
        guide.fit(batches, Dense(), subset=subset)
        variance = guide.predictive(x).variance.flatten()
        full = variance if name == "all weights" else full
        ranks = torch.stack([v.argsort().argsort().double() for v in (variance, full)])
        inside, outside = (dvi.predict(model, guide, data[part][0]) for part in ("test", "turned"))
        criterion = ByValidation([data["validation"]])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the best value is at an edge: the scores show it
            guide.tune(batches, criterion=criterion, values=PRECISIONS, refinements=0, progress=False)
        found[name] = {
            "sd": float((variance / full).sqrt().median()),
            "rank": float(torch.corrcoef(ranks)[0, 1]),
            "nll": inside.metrics(y)["nll"],
            "tuned_nll": dvi.predict(model, guide, x).metrics(y)["nll"],
            "auroc": float(auroc(inside.entropy, outside.entropy)),
        }
    inside, outside = (dvi.predict(model, guide, data[part][0], dvi.AtMean()) for part in ("test", "turned"))
    nll, separation = inside.metrics(y)["nll"], float(auroc(inside.entropy, outside.entropy))
    found["nothing"] = {"sd": 0.0, "rank": None, "nll": nll, "tuned_nll": nll, "auroc": separation}
    return {"subsets": found}


def report(rows: list[Row], folder: Path) -> str:
    """Means over seeds."""

    def cells(name: str) -> list[str]:
        values = [[row["subsets"][name][score] for row in rows] for score in SCORES]
        return ["–" if None in found else f"{mean(found):.3f}" for found in values]

    return (
        "# Subnetworks of a digits classifier\n\nDense Gauss-Newton matrices over parts of a 64-20-10 tanh network "
        f"(1,510 weights): means of {len(rows)} seeds, 500 test digits. *sd of logits, relative*: median ratio of the "
        "standard deviation to its value with all weights. *Rank correlation*: between the variances of logits and "
        "their values with all weights. *Tuned prior*: precision chosen on 297 validation digits. *AUROC*: "
        "for detecting digits rotated by 90 degrees by their entropy. "
        f"{provenance('laplace_subnetworks', rows)} Float64.\n\n"
        + table(["uncertain", *SCORES.values()], [[name, *cells(name)] for name in rows[0]["subsets"]])
    )


BENCHMARK = Benchmark(
    "laplace_subnetworks",
    "Which weights of a network, and how many, need uncertainty?",
    plan,
    run,
    report,
)
