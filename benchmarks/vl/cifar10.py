# SPDX-License-Identifier: Apache-2.0
"""A residual network with batch norm on CIFAR-10: MAP, sampled VI and Variational Laplace."""

from pathlib import Path

from torch import nn

from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings
from benchmarks.shared.images import load_split
from benchmarks.shared.networks import resnet18_cifar, small_resnet
from benchmarks.shared.tables import mean_sd, paired, provenance
from benchmarks.vl.selection import (
    METHODS,
    RULES,
    comparison,
    differences,
    in_words,
    per_seed,
    weights_to_try,
)
from benchmarks.vl.training import Recipe, posterior, train
from pyro_dvi.bayesian import smooth_activations_

# Training, validation and test images, and how to train.
TASKS = {
    "small_resnet": (
        (10_000, 2_000, 5_000),
        Recipe(10, checkpoints=(10,), one_cycle=True, mirror=True),
    ),
    "resnet18": (
        (45_000, 5_000, 10_000),
        Recipe(100, checkpoints=(100,), batch_size=128, one_cycle=True, mirror=True),
    ),
}


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """Ask for three KL weights for each method and seed, and for a further one while the best is at an end."""
    network, seeds = ("small_resnet", (0, 1)) if budget == "small" else ("resnet18", (0, 1, 2, 3, 4))
    wanted = []
    for seed in seeds:
        for method in METHODS:
            shared = {"network": network, "method": method, "seed": seed}
            done = [row for row in rows if shared.items() <= row.items()]
            wanted += [{**shared, "kl_weight": weight} for weight in weights_to_try(done, lowest=0.003)]
    return wanted


def run(settings: Settings, data_dir: str | None) -> Row:
    """Train one method with one KL weight."""
    sizes, recipe = TASKS[settings["network"]]
    data = load_split("CIFAR10", *sizes, settings["seed"], data_dir)
    make = posterior(settings["method"], settings["kl_weight"])
    return train(network(settings["network"]), data, make, recipe, settings["seed"])


def network(name: str) -> nn.Module:
    """Return a network with smooth activations."""
    return small_resnet() if name == "small_resnet" else smooth_activations_(resnet18_cifar())


def report(rows: list[Row], folder: Path) -> str:
    """Return a table of the methods for each network."""
    text = [provenance("vl_cifar10", rows)]
    for name in dict.fromkeys(row["network"] for row in rows):
        part = [row for row in rows if row["network"] == name]
        (size, validation, test), recipe = TASKS[name]
        text += [
            "",
            f"{size:,} training images, {part[0]['weights']:,} weights, {recipe.epochs} epochs; KL "
            f"weight chosen by the NLL of {validation:,} validation images; {test:,} test images. {_verdict(part)}",
            "",
            *comparison(part, METHODS),
            "",
            *differences(part),
        ]
    return "\n".join(text)


def _verdict(rows: list[Row]) -> str:
    """Say how VL at its mean compares with MAP and with the better of the two predictions of VI."""
    chosen = {
        (method, rule): per_seed([row for row in rows if row["method"] == method], rule)
        for method in METHODS
        for rule in RULES
    }
    ours, text = chosen["VL", "mean"], ""
    for rival, words in (("MAP", "MAP"), ("VI", "sampled VI")):
        found = [chosen[rival, rule] for rule in RULES if chosen[rival, rule].keys() >= ours.keys() > set()]
        if found:
            theirs = min(found, key=lambda part: sum(part[seed]["nll"] for seed in ours))
            gap = paired([ours[seed]["nll"] for seed in ours], [theirs[seed]["nll"] for seed in ours])
            accuracy = mean_sd([row["accuracy"] for row in theirs.values()])
            text += f"Compared with {words} (accuracy {accuracy}), {in_words(gap, 'the test NLL of VL at its mean')}. "
    return text.rstrip()


BENCHMARK = Benchmark(
    name="vl_cifar10",
    question="Does Variational Laplace help a residual network with batch norm on CIFAR-10?",
    plan=plan,
    run=run,
    report=report,
)
