# SPDX-License-Identifier: Apache-2.0
"""Uncertainty over some weights of a network beside that over all of them: which weights, and how many.

A 64-20-10 tanh network on scikit-learn's digits (1,510 weights, standard normal priors) is trained to its mode; then a
dense Gauss-Newton matrix is fitted over all weights, over the last layer, and over subnetworks, chosen at random or by
the largest variances of a diagonal fit. Predictions are compared with those of all weights.

    python benchmarks/laplace_subnetworks.py

writes results/laplace_subnetworks.md.
"""

import platform
import warnings
from pathlib import Path
from statistics import mean
from typing import Any

import pyro
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import pyro_dvi as dvi
from pyro_dvi.laplace import ByValidation, Dense, Diagonal, LaplaceGuide, largest_variance
from pyro_dvi.metrics import auroc

RESULTS = Path(__file__).parent / "results" / "laplace_subnetworks.md"
SEEDS, SIZES, STEPS = (0, 1, 2), (100, 300, 600), 2000
PRECISIONS = [10.0**k for k in (-1, -0.5, 0, 0.5, 1, 1.5, 2)]


def digits(seed: int) -> dict[str, tuple[Tensor, ...]]:
    """Return training, validation and test digits, and the test digits turned by a right angle."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(seed))
    images, y = torch.tensor(data.images)[order] / 16, torch.tensor(data.target)[order]
    x, turned = images.flatten(1), images.rot90(1, (1, 2)).flatten(1)
    parts = {"train": slice(0, 1000), "validation": slice(1000, 1297), "test": slice(1297, 1797)}
    return {**{name: (x[part], y[part]) for name, part in parts.items()}, "turned": (turned[parts["test"]],)}


def trained(seed: int, data: tuple[Tensor, ...]) -> tuple[Any, LaplaceGuide]:
    """Return model and guide at the mode."""
    pyro.clear_param_store()
    torch.manual_seed(seed)
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


def scores(seed: int) -> dict[str, list[float]]:
    """Return a row for each subset: relative standard deviations, rank correlation, NLL, tuned NLL, AUROC."""
    data = digits(seed)
    batches = [data["train"]]
    model, guide = trained(seed, data["train"])
    found, full = {}, torch.empty(0)
    for name, subset in subsets(guide, batches, seed).items():
        guide.scale_factors = {}
        guide.fit(batches, Dense(), subset=subset)
        variance = guide.predictive(data["test"][0]).variance.flatten()
        full = variance if name == "all weights" else full
        ranks = torch.stack([v.argsort().argsort().double() for v in (variance, full)])
        inside, outside = (dvi.predict(model, guide, data[part][0]) for part in ("test", "turned"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the best value is at an edge: the scores show it
            guide.tune(
                batches,
                criterion=ByValidation([data["validation"]]),
                values=PRECISIONS,
                refinements=0,
                progress=False,
            )
        tuned = dvi.predict(model, guide, data["test"][0])
        found[name] = [
            float((variance / full).sqrt().median()),
            float(torch.corrcoef(ranks)[0, 1]),
            inside.metrics(data["test"][1])["nll"],
            tuned.metrics(data["test"][1])["nll"],
            float(auroc(inside.entropy, outside.entropy)),
        ]
        print(seed, name, [round(v, 3) for v in found[name]], flush=True)
    inside, outside = (dvi.predict(model, guide, data[part][0], dvi.AtMean()) for part in ("test", "turned"))
    at_mode = inside.metrics(data["test"][1])["nll"]
    found["nothing"] = [0.0, float("nan"), at_mode, at_mode, float(auroc(inside.entropy, outside.entropy))]
    return found


def main() -> None:
    """Run all seeds and write the table."""
    torch.set_num_threads(1)
    runs = [scores(seed) for seed in SEEDS]
    rows = [
        f"| {name} | " + " | ".join(f"{mean(run[name][k] for run in runs):.3f}" for k in range(5)) + " |"
        for name in runs[0]
    ]
    head = (
        "| uncertain | sd of logits, relative | rank correlation | NLL | NLL, tuned prior | AUROC, turned |"
    )
    text = [
        "# Subnetworks of a digits classifier",
        "",
        f"Dense Gauss-Newton matrices over parts of a 64-20-10 tanh network (1,510 weights): means of {len(SEEDS)}",
        "seeds, 500 test digits. *sd of logits, relative*: median ratio of the standard deviation to that of all",
        "weights. *Rank correlation*: of the variances of logits with those of all weights. *Tuned prior*: its",
        "precision chosen by 297 validation digits. *AUROC*: entropy of digits turned by a right angle against upright",
        f"ones. torch {torch.__version__}, {platform.machine()}, float64.",
        "",
        head,
        "|---|---|---|---|---|---|",
        *rows,
        "",
    ]
    RESULTS.write_text("\n".join(text).replace(" nan ", " – "))


if __name__ == "__main__":
    main()
