# SPDX-License-Identifier: Apache-2.0
"""The tables, histograms and calibration curves of `vogn_lenet`, from its lines."""

from math import log
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.shared.benchmark import Row
from benchmarks.shared.tables import mean_sd, paired, provenance, table

DEFINITIONS = """\
LeNet-5 with ReLU; *no BN*: without batch normalisation after its two convolutions. VOGN uses the library's defaults
except for the option in its name: *augmented*, images shifted by up to two pixels in each direction; *K*, samples of
the weights per step; *damping*, in units of the curvature of one image; *no momentum*, the first of the betas is 0
instead of 0.9. MAP and sampled VI (`SampledELBO`) use Adam with a cosine decay. `dvi.tune` chose the KL weight of each
recipe by the NLL of 1,000 validation images, with a seed that the table does not use. VOGN and sampled VI predict with
{draws} posterior samples, MAP at its weights. Scores on the first 3,000 test images: NLL in nats; ECE with 15 bins;
AUROC, errors: for detecting wrong predictions by their confidence; the other AUROCs: for separating 1,000
out-of-distribution images from test images by predictive entropy; FPR95: the fraction of out-of-distribution images
that are accepted at the entropy threshold that accepts 95 % of the test images. ± is the standard deviation over seeds,
each with its own training images, weights and batches."""
RIVALS = {
    "VOGN": ("MAP", "sampled VI"),
    "VOGN, no BN": ("VOGN", "MAP, no BN", "sampled VI, no BN"),
    "VOGN, augmented": ("VOGN", "MAP, augmented"),
    "VOGN, K = 4": ("VOGN",),
    "VOGN, damping 0.01": ("VOGN",),
    "VOGN, no momentum": ("VOGN",),
}
FEWEST = 20  # images of all seeds in a bin of the calibration curve
DRAWN = ("MAP", "sampled VI", "VOGN", "VOGN, no BN")


def text(rows: list[Row], recipes: list[str], folder: Path, draws: int) -> str:
    """Write a section for each data set and length of training."""
    parts = [provenance("vogn_lenet", rows), DEFINITIONS.format(draws=draws)]
    kinds = sorted({(row["data"], row["num_train"], row["epochs"]) for row in rows})
    for data, num_train, epochs in kinds:
        own = [
            row for row in rows if (row["data"], row["num_train"], row["epochs"]) == (data, num_train, epochs)
        ]
        tests = {
            recipe: sorted(
                (row for row in own if (row["stage"], row["recipe"]) == ("test", recipe)),
                key=lambda row: row["seed"],
            )
            for recipe in recipes
        }
        tests = {recipe: found for recipe, found in tests.items() if found}
        parts += [f"### {data}: {num_train:,} images, {epochs} epochs", *_tables(tests)]
        if tests and set(DRAWN) & tests.keys():
            drawings = {"entropies": _draw_entropies, "calibration": _draw_calibration}
            titles = {
                "entropies": "Predictive entropies of test images and of out-of-distribution images",
                "calibration": "Accuracy by confidence, over the images of all seeds; dashed: perfect calibration",
            }
            for kind, draw in drawings.items():
                name = f"vogn_lenet_{kind}_{data}_{num_train}.png"
                draw(tests, folder / name)
                parts.append(f"![{titles[kind]}]({name})")
        parts.append(_tried([row for row in own if row["stage"] == "tune"]))
        parts += _sweeps([row for row in own if row["stage"] == "sweep"])
    return "\n\n".join(part.rstrip("\n") for part in parts)


def _tables(tests: dict[str, list[Row]]) -> list[str]:
    if not tests:
        return []
    example = next(iter(tests.values()))[0]
    scores = ["nll", "accuracy", "ece", *(key for key in example if key.startswith(("auroc", "fpr95")))]
    names = {"nll": "NLL", "accuracy": "accuracy", "ece": "ECE"}
    header = [
        "recipe",
        "KL weight",
        *(names.get(s, s.replace("auroc", "AUROC,").replace("fpr95", "FPR95,")) for s in scores),
    ]
    lines = [
        [recipe, f"{found[0]['kl_weight']:g}", *(mean_sd([row[score] for row in found]) for score in scores)]
        for recipe, found in tests.items()
    ]
    differences = []
    for recipe, rivals in RIVALS.items():
        for rival in rivals:
            ours, theirs = (tests.get(name, []) for name in (recipe, rival))
            if ours and len(ours) == len(theirs):
                cells = [paired(*([row[s] for row in part] for part in (ours, theirs))) for s in scores]
                differences.append([recipe, rival, *cells])
    about = (
        "Differences, paired by seed, ± half the 95 % interval (Student's t); bold if the interval excludes "
        "zero."
    )
    rest = [about, table(["recipe", "minus", *header[2:]], differences)] if differences else []
    return [table(header, lines), *rest]


def _tried(rows: list[Row]) -> str:
    shown = [
        f"{row['recipe']}: " + ", ".join(f"{weight:g} → {nll:.3f}" for weight, nll in row["tried"])
        for row in rows
    ]
    return "Validation NLL for each KL weight. " + "; ".join(shown) + "."


def _sweeps(rows: list[Row]) -> list[str]:
    """One option at a time, and its difference from the default."""
    if not rows:
        return []
    rows = sorted(rows, key=lambda row: row["seed"])
    scores = {"nll": "NLL", "accuracy": "accuracy", "ece": "ECE", "auroc errors": "AUROC, errors"}
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["recipe"], []).append(row)
    lines = []
    for recipe, own in found.items():
        cells = [mean_sd([row[score] for row in own]) for score in scores]
        nlls = [[row["nll"] for row in part] for part in (own, found["default"])]
        changed = recipe != "default" and len(nlls[0]) == len(nlls[1])
        lines.append([recipe, *cells, paired(*nlls) if changed else None])
    about = (
        f"VOGN with batch normalisation at the KL weight {rows[0]['kl_weight']:g}, with one option changed at a time: "
        "K, the number of weight samples per step, or damping."
    )
    return [about, table(["option", *scores.values(), "NLL minus the default's"], lines)]


def _draw_entropies(tests: dict[str, list[Row]], path: Path) -> None:
    """Entropies of test images and of images of other kinds, a panel for each recipe."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    recipes = [recipe for recipe in DRAWN if recipe in tests]
    figure, axes = plt.subplots(
        -(-len(recipes) // 2),
        2,
        figsize=(9, 5.4),
        sharex=True,
        sharey=True,
        layout="constrained",
        squeeze=False,
    )
    for ax, recipe in zip(axes.flat, recipes, strict=False):
        kinds = [key for key in tests[recipe][0] if key.startswith("entropies")]
        for kind, colour in zip(kinds, ("#0072B2", "#D55E00", "#009E73"), strict=False):
            shares: Any = [mean(values) for values in zip(*(row[kind] for row in tests[recipe]), strict=True)]
            edges = [log(10) * k / len(shares) for k in range(len(shares) + 1)]
            label = kind.removeprefix("entropies ").replace("inside", "test images")
            ax.stairs(shares, edges, color=colour, fill=True, alpha=0.25)
            ax.stairs(shares, edges, color=colour, label=label)
        ax.set_title(recipe)
    figure.supxlabel("entropy of the prediction, nats")
    figure.supylabel("share of images, mean over seeds")
    axes[0][0].legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_calibration(tests: dict[str, list[Row]], path: Path) -> None:
    """Accuracy against confidence over the examples of all seeds, in bins that hold enough of them."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(4.2, 3.8), layout="constrained")
    styles = (("#000000", "o"), ("#E69F00", "s"), ("#0072B2", "^"), ("#009E73", "v"))
    for recipe, (colour, marker) in zip(DRAWN, styles, strict=True):
        if recipe in tests:
            sums = torch.tensor([row["calibration"] for row in tests[recipe]]).sum(0)
            count, confidence, accuracy = sums[:, sums[0] >= FEWEST]
            ax.plot(
                confidence / count, accuracy / count, color=colour, marker=marker, markersize=4, label=recipe
            )
    ax.plot([0, 1], [0, 1], "--", color="grey", linewidth=0.8)
    ax.set(xlabel="confidence", ylabel="accuracy")
    ax.legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
