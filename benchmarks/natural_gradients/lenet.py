# SPDX-License-Identifier: Apache-2.0
"""LeNet-5 by VOGN with and without batch normalisation, augmentation, momentum, several draws a step, and damping.

Each recipe has its own KL weight, by the NLL of validation images with a seed that the tables do not use. In the sweeps
of draws and damping one option changes at a time, and the KL weight stays.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pyro.infer import SVI
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_dvi as dvi
from benchmarks.natural_gradients import lenet_tables
from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings, device
from benchmarks.shared.images import load_split, outside_images
from benchmarks.shared.methods import METHODS, NUM_SAMPLES, Training
from benchmarks.shared.networks import lenet
from pyro_dvi import metrics

TUNING_SEED, SEEDS = 100, (0, 1, 2)
KL_WEIGHTS = (0.01, 0.03, 0.1)  # to begin with
OUTSIDE = {"MNIST": ("FashionMNIST", "notMNIST"), "CIFAR10": ("noise",)}
BINS = 24  # of entropies, from 0 to log 10


@dataclass(frozen=True)
class Recipe:
    """How a network is trained.

    Attributes:
        method: of the shared table; VOGN with the options below is its own.
        norm: batch normalisation after each convolution.
        augmented: images are moved by up to two pixels in each direction.
        draws: of the weights in a step.
        damping: of VOGN.
        momentum: of VOGN, the first of its betas.
    """

    method: str = "VOGN"
    norm: bool = True
    augmented: bool = False
    draws: int = 1
    damping: float = 0.0
    momentum: float = 0.9


RECIPES = {
    "VOGN": Recipe(),
    "VOGN, augmented": Recipe(augmented=True),
    "VOGN, K = 4": Recipe(draws=4),
    "VOGN, damping 0.01": Recipe(damping=0.01),
    "VOGN, no momentum": Recipe(momentum=0.0),
    "VOGN, no BN": Recipe(norm=False),
    "MAP": Recipe("MAP"),
    "MAP, augmented": Recipe("MAP", augmented=True),
    "MAP, no BN": Recipe("MAP", norm=False),
    "sampled VI": Recipe("sampled VI"),
    "sampled VI, no BN": Recipe("sampled VI", norm=False),
}
SWEEPS = {
    "default": Recipe(),
    **{f"K = {k}": Recipe(draws=k) for k in (4, 8)},
    **{f"damping {d:g}": Recipe(damping=d) for d in (1e-2, 1e-1)},
}
SWEPT_AT = 0.03  # the KL weight
SIZES: dict[str, list[dict[str, Any]]] = {
    "small": [{"data": "MNIST", "num_train": 2000, "epochs": 15}],
    "gpu": [
        {"data": data, "num_train": n, "epochs": 100} for data, n in (("MNIST", 55_000), ("CIFAR10", 19_000))
    ],
}


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """Ask for the choice of each recipe's KL weight, then for its training with every seed; and for the sweeps."""
    wanted: list[Settings] = []
    for size in SIZES[budget]:
        sweep = {"stage": "sweep", **size, "kl_weight": SWEPT_AT}
        wanted += [{**sweep, "recipe": recipe, "seed": seed} for recipe in SWEEPS for seed in SEEDS]
        for recipe in RECIPES:
            tuning = {"stage": "tune", "recipe": recipe, "seed": TUNING_SEED, **size}
            found = next((row for row in rows if tuning.items() <= row.items()), None)
            if found is None:
                wanted.append(tuning)
            else:
                test = {**tuning, "stage": "test", "kl_weight": found["kl_weight"]}
                wanted += [{**test, "seed": seed} for seed in SEEDS]
    return wanted


def run(settings: Settings, data_dir: str | None) -> Row:
    """Choose a KL weight, or train and test once."""
    split = load_split(settings["data"], settings["num_train"], 1000, 3000, settings["seed"], data_dir)
    recipe = (SWEEPS if settings["stage"] == "sweep" else RECIPES)[settings["recipe"]]
    train, validation, test = (
        tuple(part.to(device()) for part in pair) for pair in (split.train, split.validation, split.test)
    )
    trained = partial(trained_by, recipe, train, validation, settings["epochs"])
    rule = METHODS[recipe.method].rule
    if settings["stage"] == "tune":
        tuned = dvi.tune(
            trained,
            validation,
            {"kl_weight": KL_WEIGHTS},
            score=lambda model, guide, pair: dvi.predict(model, guide, pair, seed=0).metrics()["nll"],
            max_trainings=6,
            progress=False,
        )
        tried = zip(tuned.table["kl_weight"], tuned.table["score"], strict=True)
        return {**tuned.settings, "tried": list(tried)}
    model, guide = trained(settings["kl_weight"])
    prediction = dvi.predict(model, guide, test, rule, seed=0)
    scores = prediction.metrics()
    row: Row = {name: scores[name] for name in ("nll", "accuracy", "ece")}
    row["auroc errors"] = metrics.misclassification_auroc(prediction.probabilities, test[1])
    if settings["stage"] == "sweep":
        return row
    bins = metrics.reliability_table(prediction.probabilities, test[1])  # as sums, which add up over seeds
    sums = torch.stack([torch.ones_like(bins.accuracy), bins.confidence, bins.accuracy]) * bins.count
    row["calibration"] = sums.nan_to_num().tolist()
    row["entropies inside"] = histogram(prediction.entropy)
    for name in OUTSIDE[settings["data"]]:
        x = outside_images(name, settings["data"], 1000, data_dir).to(device())
        entropy = dvi.predict(model, guide, x, rule, seed=0).entropy
        row[f"auroc {name}"] = metrics.auroc(prediction.entropy, entropy)
        row[f"fpr95 {name}"] = metrics.fpr_at_tpr(prediction.entropy, entropy)
        row[f"entropies {name}"] = histogram(entropy)
    return row


def trained_by(recipe: Recipe, train: Any, validation: Any, epochs: int, kl_weight: float) -> tuple[Any, Any]:
    """Return a model and its guide, trained anew."""
    channels = train[0].shape[1]
    net = lenet(activation=nn.ReLU, channels=channels, padding=0 if channels == 3 else 2)
    net = with_batch_norm(net) if recipe.norm else net
    model = dvi.classifier(dvi.to_bayesian_(net.to(device()), prior_scale=dvi.bayesian.fan_in), len(train[0]))
    loader: Any = DataLoader(TensorDataset(*train), 100, shuffle=True)
    loader = Moved(loader) if recipe.augmented else loader
    if recipe.method != "VOGN":
        return METHODS[recipe.method].train(model, Training(kl_weight, 3e-3, epochs, loader, validation))
    guide = dvi.NaturalGradientGuide(model)
    elbo = dvi.NaturalGradientELBO(kl_weight=kl_weight, num_particles=recipe.draws)
    optimizer = dvi.VOGN({"damping": recipe.damping, "betas": (recipe.momentum, 0.999)})
    dvi.fit(SVI(model, guide, optimizer, loss=elbo), loader, epochs, progress=False)
    return model, guide


class Moved:
    """Minibatches whose images are moved by up to two pixels in each direction, filled with the background."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader, self.dataset = loader, loader.dataset

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in self.loader:
            size = x.shape[-1]
            windows = F.pad(x, (2, 2, 2, 2), value=float(x.min())).unfold(2, size, 1).unfold(3, size, 1)
            row, column = torch.randint(5, (2, len(x)), device=x.device)
            yield windows[torch.arange(len(x), device=x.device), :, row, column], y


def with_batch_norm(net: nn.Sequential) -> nn.Sequential:
    """Put batch normalisation after each convolution."""
    layers: list[nn.Module] = []
    for layer in net:
        layers.append(layer)
        if isinstance(layer, nn.Conv2d):
            layers.append(nn.BatchNorm2d(layer.out_channels))
    return nn.Sequential(*layers)


def histogram(entropy: Tensor) -> list[float]:
    """Shares of images by entropy."""
    counts = torch.histc(entropy.float().cpu(), BINS, 0.0, float(torch.tensor(10.0).log()) + 1e-6)
    return [round(share, 4) for share in (counts / counts.sum()).tolist()]


def report(rows: list[Row], folder: Path) -> str:
    """A section for each data set."""
    return lenet_tables.text(rows, list(RECIPES), folder, NUM_SAMPLES)


BENCHMARK = Benchmark(
    "vogn_lenet",
    "How do batch normalisation, augmentation, momentum, samples per step and damping affect VOGN on LeNet-5?",
    plan,
    run,
    report,
)
