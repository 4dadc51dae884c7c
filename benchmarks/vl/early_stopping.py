# SPDX-License-Identifier: Apache-2.0
"""Do variances that have not converged look like a better fit? Learning rates of log σ, for VL and for sampled VI."""

from pathlib import Path
from statistics import mean

from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings
from benchmarks.shared.figures import COLOURS, MARKERS, plain_numbers
from benchmarks.shared.images import load_split
from benchmarks.shared.networks import conv_net
from benchmarks.shared.tables import mean_sd, paired, provenance, table
from benchmarks.vl.selection import in_words
from benchmarks.vl.training import Recipe, posterior, train

MULTIPLIERS = (1.0, 3.0, 10.0, 30.0)
CHECKPOINTS = (1, 2, 4, 7, 10, 15, 20, 30, 40)
RULE = {"VL": "mean", "VI": "samples"}  # as each method is meant to predict


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """Ask for the untempered objective, KL weight 1, and for the tempered one."""
    size, seeds = (2000, (0, 1, 2)) if budget == "small" else (50_000, (0, 1, 2, 3, 4))
    return [
        {
            "method": method,
            "kl_weight": weight,
            "scale_multiplier": multiplier,
            "num_train": size,
            "seed": seed,
        }
        for seed in seeds
        for weight in (1.0, 0.03)
        for method in RULE
        for multiplier in MULTIPLIERS
    ]


def run(settings: Settings, data_dir: str | None) -> Row:
    """Train once, and score at many epochs."""
    data = load_split("FashionMNIST", settings["num_train"], 2000, 5000, settings["seed"], data_dir)
    make = posterior(settings["method"], settings["kl_weight"])
    recipe = Recipe(40, CHECKPOINTS, scale_multiplier=settings["scale_multiplier"])
    return train(conv_net(), data, make, recipe, settings["seed"])


def report(rows: list[Row], folder: Path) -> str:
    """Return tables of first and last epochs, and draw the curves."""
    size = max(row["num_train"] for row in rows)
    rows = [row for row in rows if row["num_train"] == size]
    text = [
        provenance("vl_early_stopping", rows),
        f"{size:,} images, mean ± standard deviation over seeds; VL predicts at its mean, VI with 10 samples. "
        "The lowest test NLL is chosen on the test images, as a reader of the curve would choose it. The tempered "
        "ELBO of the paper's figure is the training objective, with the KL weight of the heading; the untempered "
        "ELBO has KL weight 1. Both are per example. The standard deviations of VL start at e⁻³ times the prior's, "
        "and those of VI at 0.01.",
    ]
    for weight in sorted({row["kl_weight"] for row in rows}, reverse=True):
        lines = []
        for method in RULE:
            for multiplier in MULTIPLIERS:
                setting = {"method": method, "kl_weight": weight, "scale_multiplier": multiplier}
                part = [row for row in rows if setting.items() <= row.items()]
                if part:
                    lines.append([method, f"{multiplier:g}", *_cells(part, RULE[method])])
        header = [
            "method",
            "multiplier of the step size of log σ",
            "tempered ELBO at the end",
            "untempered ELBO at the end",
            "lowest test NLL",
            "epoch of the lowest NLL",
            "test NLL at the end",
        ]
        text += ["", f"**KL weight {weight:g}**", "", table(header, lines)]
        of_weight = [row for row in rows if row["kl_weight"] == weight]
        said = [_verdict([row for row in of_weight if row["method"] == method], method) for method in RULE]
        text += [f"- {sentence}" for sentence in said if sentence]
        picture = f"vl_early_stopping_{weight:g}.png"
        _draw(of_weight, folder / picture)
        text += [
            "",
            f"![Minus tempered ELBO, and test NLL, over epochs at KL weight {weight:g}, mean over seeds]({picture})",
        ]
    return "\n".join(text)


def _verdict(rows: list[Row], method: str) -> str:
    """Say whether slow variances are further from the optimum, and whether they look better."""
    last = {(row["scale_multiplier"], row["seed"]): row for row in rows}
    seeds = [seed for multiplier, seed in last if multiplier == 1.0 and (10.0, seed) in last]
    if not seeds:
        return ""
    slow, fast = ([last[multiplier, seed] for seed in seeds] for multiplier in (1.0, 10.0))
    elbo = paired([tempered_elbos(row)[-1] for row in slow], [tempered_elbos(row)[-1] for row in fast])
    nll = paired(*([row["checkpoints"][-1][RULE[method]]["nll"] for row in part] for part in (slow, fast)))
    return (
        f"{method} with the step size of the means for log σ, compared with ten times this, after the last epoch: "
        f"{in_words(elbo, 'the tempered ELBO')}; {in_words(nll, 'the test NLL')}."
    )


def _cells(part: list[Row], rule: str) -> list[str]:
    curves = [[checkpoint[rule]["nll"] for checkpoint in row["checkpoints"]] for row in part]
    average = [mean(values) for values in zip(*curves, strict=True)]
    best = min(range(len(average)), key=average.__getitem__)
    return [
        mean_sd([tempered_elbos(row)[-1] for row in part], 2),
        mean_sd([row["checkpoints"][-1]["untempered_elbo"] for row in part], 2),
        mean_sd([curve[best] for curve in curves]),
        str(part[0]["checkpoints"][best]["epoch"]),
        mean_sd([curve[-1] for curve in curves]),
    ]


def _draw(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(9, 6), layout="constrained", sharex=True)
    for (above, below), method in zip(axes.T, RULE, strict=True):
        for colour, marker, multiplier in zip(COLOURS, MARKERS, MULTIPLIERS, strict=False):
            part = [row for row in rows if (row["method"], row["scale_multiplier"]) == (method, multiplier)]
            if not part:
                continue
            epochs = [checkpoint["epoch"] for checkpoint in part[0]["checkpoints"]]
            losses = [[-elbo for elbo in tempered_elbos(row)] for row in part]
            nlls = [[checkpoint[RULE[method]]["nll"] for checkpoint in row["checkpoints"]] for row in part]
            for axis, curves in ((above, losses), (below, nlls)):
                heights = [mean(values) for values in zip(*curves, strict=True)]
                axis.plot(epochs, heights, marker=marker, markersize=4, color=colour, label=f"{multiplier:g}")
        above.set(title=method, ylabel="minus tempered ELBO per example", yscale="log")
        plain_numbers(above.yaxis, (0.4, 0.6, 1, 2, 3, 5, 10))
        below.set(xlabel="epoch", ylabel="test NLL")
    axes[1, 0].legend(title="rate of log σ over the means'", frameon=False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def tempered_elbos(row: Row) -> list[float]:
    """Return the ELBO at the training's own KL weight, per example, at each checkpoint."""
    spared = (1 - row["kl_weight"]) / row[
        "num_train"
    ]  # of the divergence, which the untempered one has in full
    return [checkpoint["untempered_elbo"] + spared * checkpoint["kl"] for checkpoint in row["checkpoints"]]


BENCHMARK = Benchmark(
    name="vl_early_stopping",
    question="Do variances that have not converged look like a better fit?",
    plan=plan,
    run=run,
    report=report,
)
