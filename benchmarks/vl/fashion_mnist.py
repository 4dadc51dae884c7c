# SPDX-License-Identifier: Apache-2.0
"""MAP, sampled VI and Variational Laplace with its variants on Fashion-MNIST, paired by seed."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

import pyro_dvi as dvi
from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings
from benchmarks.shared.images import load_split
from benchmarks.shared.networks import conv_net, mlp
from benchmarks.shared.tables import mean_sd, provenance, table
from benchmarks.vl.selection import METHODS, comparison, differences, per_seed
from benchmarks.vl.training import Posterior, Recipe, posterior, train
from pyro_dvi.curvature import Fisher, GGNDiagonal, MinibatchGradient
from pyro_dvi.guides import PerSite, SGDStepSize
from pyro_dvi.guides.factors import ScaleFamily

KL_WEIGHTS = {
    ("conv_net", 2000): (0.01, 0.03, 0.1, 0.3, 1.0),
    ("conv_net", 10000): (0.01, 0.03),
    ("conv_net, width 16", 10000): (0.03, 0.1),
}
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "conv_net": conv_net,
    "conv_net, width 16": lambda: conv_net(width=16),
    "mlp": lambda: mlp((784, 100, 100, 10)),
}
SEEDS = (0, 1, 2)
SGD_VARIANCE = SGDStepSize(lr=2e-2, batch_size=100)  # a variance of 1e-4
# Covariance family of the guide, and objective.
VARIANTS: dict[str, tuple[ScaleFamily | None, Callable[..., Any]]] = {
    "VL, every 8th step": (None, partial(dvi.TaylorELBO, curvature=Fisher(every=8))),
    "VL, one scale per site": (PerSite(), dvi.TaylorELBO),
    "VI, one scale per site": (PerSite(), dvi.SampledELBO),
    "VL, fixed variance 1e-4": (SGD_VARIANCE, dvi.TaylorELBO),
    "VL, SGD variance, minibatch gradient": (
        SGD_VARIANCE,
        partial(dvi.TaylorELBO, curvature=MinibatchGradient()),
    ),
    "VL, exact GGN": (None, partial(dvi.TaylorELBO, curvature=GGNDiagonal())),
}


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """Ask for all KL weights of the main comparison, and for the variants at one of them."""
    sizes = dict(KL_WEIGHTS)
    if budget == "gpu":
        sizes["conv_net, width 16", 50000] = (0.01, 0.03, 0.1)
    wanted = [
        _settings("main", method, weight, seed, num_train=size, network=network)
        for (network, size), weights in sizes.items()
        for weight in weights
        for method in METHODS
        for seed in SEEDS
    ]
    for seed in SEEDS:
        wanted += [_settings("variants", method, 0.03, seed) for method in VARIANTS]
        wanted.append(_settings("untempered", "VI, one scale per site", 1.0, seed))
        wanted += [_settings("scale_lr", "VL", 0.03, seed, scale_multiplier=m) for m in (1.0, 30.0)]
        wanted += [
            _settings("mlp", method, weight, seed, network="mlp")
            for weight in (0.03, 0.3)
            for method in METHODS
        ]
    return wanted


def _settings(part: str, method: str, kl_weight: float, seed: int, **others: Any) -> Settings:
    rest = {"num_train": 2000, "network": "conv_net", "scale_multiplier": 10.0, **others}
    return {"part": part, "method": method, "kl_weight": kl_weight, "seed": seed, **rest}


def run(settings: Settings, data_dir: str | None) -> Row:
    """Train one method with one KL weight, and score it at eight epochs."""
    size = settings["num_train"]
    data = load_split("FashionMNIST", size, 2000, 5000, settings["seed"], data_dir)
    epochs = 40 if size == 2000 else 16
    checkpoints = tuple(range(epochs // 8, epochs + 1, epochs // 8))
    recipe = Recipe(epochs, checkpoints, scale_multiplier=settings["scale_multiplier"])
    method, kl_weight = settings["method"], settings["kl_weight"]
    make = _variant(method, kl_weight) if method in VARIANTS else posterior(method, kl_weight)
    return train(NETWORKS[settings["network"]](), data, make, recipe, settings["seed"])


def _variant(method: str, kl_weight: float) -> Posterior:
    scale, elbo = VARIANTS[method]
    return lambda model: (dvi.MeanFieldGuide(model, scale=scale), elbo(kl_weight=kl_weight))


def report(rows: list[Row], folder: Path) -> str:
    """Return a table for each network and size, the variants, and the learning rates of the scales."""
    text = [
        provenance("vl_fashion_mnist", rows),
        "Mean ± standard deviation over seeds; KL weight and stopping epoch are chosen by the NLL of 2,000 validation "
        "images; there are 5,000 test images.",
    ]
    main = [row for row in rows if row["part"] == "main"]
    for size, network in sorted({(row["num_train"], row["network"]) for row in main}):
        part = [row for row in main if (row["num_train"], row["network"]) == (size, network)]
        tested = sorted({row["kl_weight"] for row in part})
        weights = ", ".join(f"{weight:g}" for weight in tested)
        text += [
            "",
            f"### {size:,} training images, {part[0]['weights']:,} weights, KL weights {weights}",
            "",
        ]
        text += comparison(part, METHODS) + ["", *differences(part)]
        if 1.0 in tested:
            text += ["", "At KL weight 1, the untempered posterior:", ""]
            text += comparison(part, METHODS, lambda row: row["kl_weight"] == 1.0)
    if variants := [row for row in rows if row["part"] == "variants"]:
        size, weight = variants[0]["num_train"], variants[0]["kl_weight"]
        base = [row for row in main if row["num_train"] == size and row["kl_weight"] == weight]
        text += ["", f"### Variants, {size:,} images, KL weight {weight}", ""]
        text += comparison(base + variants, dict.fromkeys(row["method"] for row in [*base, *variants]))
    if untempered := [row for row in rows if row["part"] == "untempered"]:
        text += ["", f"### One scale per site at KL weight 1, {untempered[0]['num_train']:,} images", ""]
        text += comparison(untempered, dict.fromkeys(row["method"] for row in untempered))
    if small := [row for row in rows if row["part"] == "mlp"]:
        text += ["", f"### A network without batch norm: MLP with {small[0]['weights']:,} weights", ""]
        text += comparison(small, METHODS) + ["", *differences(small)]
    if rates := [row for row in rows if row["part"] == "scale_lr"]:
        shared = {key: rates[0][key] for key in ("method", "num_train", "network", "kl_weight")}
        rates += [row for row in main if shared.items() <= row.items()]
        text += [
            "",
            "### Learning rate of log σ, as a multiple of the learning rate of the means",
            "",
            _scale_rates(rates),
        ]
    return "\n".join(text)


def _scale_rates(rows: list[Row]) -> str:
    lines = []
    for multiplier in sorted({row["scale_multiplier"] for row in rows}):
        part = [row for row in rows if row["scale_multiplier"] == multiplier]
        chosen = list(per_seed(part, "mean").values())
        elbo = mean_sd([row["checkpoints"][-1]["untempered_elbo"] for row in part], 2)
        scores = [mean_sd([row[key] for row in chosen]) for key in ("validation_nll", "nll")]
        lines.append([f"{multiplier:g}", elbo, *scores])
    header = [
        "multiplier",
        "untempered ELBO per example at the end",
        "lowest validation NLL",
        "its test NLL",
    ]
    return table(header, lines)


BENCHMARK = Benchmark(
    name="vl_fashion_mnist",
    question="How good are the predictions of Variational Laplace, compared with MAP and sampled VI?",
    plan=plan,
    run=run,
    report=report,
)
