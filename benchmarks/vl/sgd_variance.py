# SPDX-License-Identifier: Apache-2.0
"""One fixed variance for all weights, from 1e-6 to 1e-2: Fisher, squared minibatch gradients, and drawn weights.

Only the means are learned. The variance is that of SGD with a step size of twice the variance times the size of the
minibatch. Drawn weights are trained for four times as many epochs as well, since their gradients are noisier.
"""

from pathlib import Path
from statistics import mean
from typing import Any

import pyro_dvi as dvi
from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings
from benchmarks.shared.figures import COLOURS, MARKERS, plain_numbers
from benchmarks.shared.images import load_split
from benchmarks.shared.networks import conv_net
from benchmarks.shared.tables import mean_sd, paired, provenance, table
from benchmarks.vl.selection import in_words
from benchmarks.vl.training import Posterior, Recipe, train
from pyro_dvi.curvature import Fisher, MinibatchGradient
from pyro_dvi.guides import SGDStepSize

VARIANCES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
EPOCHS = 30
BATCH_SIZE = 100
KL_WEIGHT = 0.03  # of weight decay, the only part of the divergence that learns
# Curvature (None: weights are drawn) and epochs.
METHODS: dict[str, tuple[Any, int]] = {
    "Fisher": (Fisher, EPOCHS),
    "MinibatchGradient": (MinibatchGradient, EPOCHS),
    "drawn weights": (None, EPOCHS),
    "drawn weights, 4 times the epochs": (None, 4 * EPOCHS),
}


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """Ask for every method at every variance."""
    size, seeds = (2000, (0, 1, 2)) if budget == "small" else (50_000, (0, 1, 2, 3, 4))
    return [
        {"method": method, "variance": variance, "num_train": size, "seed": seed}
        for seed in seeds
        for variance in VARIANCES
        for method in METHODS
    ]


def run(settings: Settings, data_dir: str | None) -> Row:
    """Train once at a fixed variance."""
    data = load_split("FashionMNIST", settings["num_train"], 2000, 5000, settings["seed"], data_dir)
    epochs = METHODS[settings["method"]][1]
    recipe = Recipe(epochs, checkpoints=(epochs,), batch_size=BATCH_SIZE, one_cycle=True)
    return train(conv_net(), data, _posterior(**settings), recipe, settings["seed"])


def _posterior(method: str, variance: float, **_: Any) -> Posterior:
    scale = SGDStepSize(lr=2 * BATCH_SIZE * variance, batch_size=BATCH_SIZE)
    curvature = METHODS[method][0]
    if curvature is None:
        elbo: Any = dvi.SampledELBO(kl_weight=KL_WEIGHT)
    else:
        elbo = dvi.TaylorELBO(kl_weight=KL_WEIGHT, curvature=curvature())
    return lambda model: (dvi.MeanFieldGuide(model, scale=scale), elbo)


def report(rows: list[Row], folder: Path) -> str:
    """Return a table of test NLL by variance, and draw it."""
    size = max(row["num_train"] for row in rows)
    rows = [row for row in rows if row["num_train"] == size]
    text = [
        provenance("vl_sgd_variance", rows),
        f"{size:,} images, {EPOCHS} epochs unless stated otherwise; test NLL at the mean and with 10 samples, mean ± "
        f"standard deviation over seeds. The KL weight, here the weight of the weight decay, is {KL_WEIGHT:g} "
        "everywhere. An empty cell means that training diverged.",
    ]
    for rule, words in (("mean", "At the mean"), ("samples", "10 samples")):
        lines = [[f"{v:.0e}", *(_cell(_nlls(rows, m, v, rule)) for m in METHODS)] for v in VARIANCES]
        text += ["", f"**{words}**", "", table(["variance", *METHODS], lines)]
        text += [f"- {said}" for method in METHODS if (said := _verdict(rows, method, rule))]
    _draw(rows, folder / "vl_sgd_variance.png")
    text += ["", "![Test NLL by fixed variance, mean over seeds](vl_sgd_variance.png)"]
    return "\n".join(text)


def _verdict(rows: list[Row], method: str, rule: str) -> str:
    """Say which variance has the lowest NLL, and whether it is better than almost none."""
    found = {v: nlls for v in VARIANCES if (nlls := _nlls(rows, method, v, rule))}
    if not found:
        return ""
    best = min(found, key=lambda v: mean(found[v]))
    smallest = min(found)
    if best == smallest or len(found[best]) != len(found[smallest]):
        return f"{method}: the test NLL is lowest at the variance {best:.0e}."
    gap = in_words(paired(found[best], found[smallest]), "it")
    return (
        f"{method}: the test NLL is lowest at the variance {best:.0e}; compared with {smallest:.0e}, {gap}."
    )


def _nlls(rows: list[Row], method: str, variance: float, rule: str) -> list[float]:
    part = [row for row in rows if (row["method"], row["variance"]) == (method, variance)]
    part.sort(key=lambda row: row["seed"])
    return [row["checkpoints"][-1][rule]["nll"] for row in part if row["checkpoints"]]


def _cell(values: list[float]) -> str | None:
    return mean_sd(values) if values else None


def _draw(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharey=True)
    for axis, rule, title in zip(axes, ("mean", "samples"), ("at the mean", "10 samples"), strict=True):
        for method, colour, marker in zip(METHODS, COLOURS, MARKERS, strict=False):
            points = [(v, mean(found)) for v in VARIANCES if (found := _nlls(rows, method, v, rule))]
            axis.plot(*zip(*points, strict=True), marker=marker, color=colour, label=method)
        axis.set(xscale="log", yscale="log", title=title, xlabel="variance of every weight")
        axis.spines[["top", "right"]].set_visible(False)
    plain_numbers(axes[0].yaxis, (0.5, 0.6, 0.8, 1, 1.5, 2))
    axes[0].set_ylabel("test NLL")
    axes[0].legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)


BENCHMARK = Benchmark(
    name="vl_sgd_variance",
    question="Which fixed variance, and hence which step size of SGD, generalises best?",
    plan=plan,
    run=run,
    report=report,
)
