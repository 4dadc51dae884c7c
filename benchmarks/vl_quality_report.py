# SPDX-License-Identifier: Apache-2.0
"""Tables and the figure of vl_quality.py, from its result lines."""

from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

Row = dict[str, Any]
COLUMNS = ("nll", "ece", "accuracy", "nll_temperature_scaled")
RULES = {"mean": "at the mean", "samples": "10 samples"}


def selected(rows: Iterable[Row], rule: str) -> Row | None:
    """The checkpoint with the lowest validation NLL among all KL weights and epochs of one seed."""
    candidates = [
        {**checkpoint[rule], "epoch": checkpoint["epoch"], "kl_weight": row["kl_weight"]}
        for row in rows
        for checkpoint in row["checkpoints"]
        if "nll" in checkpoint.get(rule, {})
    ]
    return min(candidates, key=lambda c: c["validation_nll"], default=None)


def per_seed(rows: list[Row], rule: str) -> dict[int, Row]:
    chosen = {
        seed: selected([r for r in rows if r["seed"] == seed], rule) for seed in {r["seed"] for r in rows}
    }
    return {seed: row for seed, row in sorted(chosen.items()) if row is not None}


def spread(values: Iterable[float], digits: int = 3) -> str:
    values = list(values)
    return f"{mean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")


def metrics_line(label: str, chosen: dict[int, Row]) -> str:
    cells = [spread(row[column] for row in chosen.values()) for column in COLUMNS]
    weights = ", ".join(f"{w:g}" for w in sorted({row["kl_weight"] for row in chosen.values()}))
    epochs = ", ".join(str(row["epoch"]) for row in chosen.values())
    return f"| {label} | {' | '.join(cells)} | {weights} | {epochs} |"


HEADER = [
    "| method | test NLL | ECE | accuracy | NLL, temperature-scaled | KL weight | epoch |",
    "|---|---|---|---|---|---|---|",
]


def comparison(
    rows: list[Row], methods: Iterable[str], keep: Callable[[Row], bool] = lambda row: True
) -> list[str]:
    lines = list(HEADER)
    for method in methods:
        of_method = [row for row in rows if row["method"] == method and keep(row)]
        for rule, words in RULES.items():
            chosen = per_seed(of_method, rule)
            if chosen:
                lines.append(metrics_line(f"{method}, {words}" if method != "MAP" else "MAP", chosen))
    return lines


def paired(rows: list[Row]) -> list[str]:
    """Gain of VL at the mean over each rival, seed by seed."""
    ours = per_seed([r for r in rows if r["method"] == "VL"], "mean")
    lines = ["| rival | NLL gain of VL at the mean, per seed | mean gain |", "|---|---|---|"]
    for method, rule in (("MAP", "mean"), ("VI", "mean"), ("VI", "samples")):
        theirs = per_seed([r for r in rows if r["method"] == method], rule)
        gains = [theirs[s]["nll"] - ours[s]["nll"] for s in ours if s in theirs]
        if gains:
            label = method if method == "MAP" else f"VI, {RULES[rule]}"
            lines.append(f"| {label} | {', '.join(f'{g:+.3f}' for g in gains)} | {mean(gains):+.3f} |")
    return lines


def write_report(rows: list[Row], path: Path) -> None:
    """Write every table that the results allow to ``path``, and the figure beside it."""
    if not rows:
        return
    text = [
        "Written by `benchmarks/vl_quality.py`. Mean ± standard deviation over seeds; KL weight and stopping epoch by "
        f"validation NLL on 2,000 images, test on 5,000. torch {rows[-1]['torch']}, {rows[-1]['machine']}, CPU.",
    ]
    main = [row for row in rows if row["part"] == "main"]
    for size, network in sorted({(row["num_train"], row["network"]) for row in main}):
        part = [row for row in main if (row["num_train"], row["network"]) == (size, network)]
        tested = sorted({row["kl_weight"] for row in part})
        text += ["", f"### {size:,} training images, {part[0]['weights']:,} weights, KL weights {tested}", ""]
        text += comparison(part, ("VL", "MAP", "VI")) + ["", *paired(part)]
        if 1.0 in tested:
            text += ["", "At KL weight 1, the untempered posterior:", ""]
            text += comparison(part, ("VL", "MAP", "VI"), lambda row: row["kl_weight"] == 1.0)
    variants = [row for row in rows if row["part"] == "variants"]
    if variants:
        size, weight = variants[0]["num_train"], variants[0]["kl_weight"]
        base = [row for row in main if row["num_train"] == size and row["kl_weight"] == weight]
        text += ["", f"### Variants, {size:,} images, KL weight {weight}", ""]
        text += comparison(base + variants, dict.fromkeys(row["method"] for row in [*base, *variants]))
    small = [row for row in rows if row["part"] == "mlp"]
    if small:
        text += ["", f"### A network without batch norm: MLP with {small[0]['weights']:,} weights", ""]
        text += comparison(small, ("VL", "MAP", "VI")) + ["", *paired(small)]
    rates = [row for row in rows if row["part"] == "scale_lr"]
    if rates:
        size, weight = rates[0]["num_train"], rates[0]["kl_weight"]
        rates += [
            row for row in main if (row["method"], row["num_train"], row["kl_weight"]) == ("VL", size, weight)
        ]
        text += ["", "### Learning rate of log σ over that of the means", "", *scale_rates(rates)]
        plot_scale_rates(rates, path.with_name("vl_scale_lr.png"))
    path.write_text("\n".join(text) + "\n")


def scale_rates(rows: list[Row]) -> list[str]:
    lines = [
        "| multiplier | untempered ELBO per example at the end | lowest validation NLL | test NLL there |"
    ]
    lines.append("|---|---|---|---|")
    for multiplier in sorted({row["scale_multiplier"] for row in rows}):
        part = [row for row in rows if row["scale_multiplier"] == multiplier]
        chosen = per_seed(part, "mean").values()
        elbo = spread((row["checkpoints"][-1]["untempered_elbo"] for row in part), 2)
        lines.append(
            f"| {multiplier:g} | {elbo} | {spread(c['validation_nll'] for c in chosen)} | "
            f"{spread(c['nll'] for c in chosen)} |"
        )
    return lines


def plot_scale_rates(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    colours = ["#0072B2", "#009E73", "#E69F00", "#CC79A7"]  # Okabe & Ito: safe for colour-blind readers
    for colour, multiplier in zip(colours, sorted({row["scale_multiplier"] for row in rows}), strict=False):
        part = [row for row in rows if row["scale_multiplier"] == multiplier]
        epochs = [c["epoch"] for c in part[0]["checkpoints"]]
        for axis, value in (
            (left, lambda c: c["untempered_elbo"]),
            (right, lambda c: c["mean"]["validation_nll"]),
        ):
            curves = [[value(c) for c in row["checkpoints"]] for row in part]
            axis.plot(
                epochs, [mean(v) for v in zip(*curves, strict=True)], color=colour, label=f"{multiplier:g}"
            )
    left.set(xlabel="epoch", ylabel="untempered ELBO per example")
    right.set(xlabel="epoch", ylabel="validation NLL at the mean")
    right.legend(title="log σ learning rate over means'", frameon=False)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
