# SPDX-License-Identifier: Apache-2.0
"""Tables of uci.py, from its result lines."""

from collections import Counter
from collections.abc import Iterable
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

Row = dict[str, Any]
PROTOCOL = "MNVI, paper's protocol"

# Per-example test log-likelihood on 10 folds. Paper: Schmitt & Roth (2021), Table 1. Code: what the code that its
# authors published gives with its own settings.
PAPER = {
    "boston": -2.43,
    "concrete": -3.05,
    "energy": -1.33,
    "kin8nm": 1.15,
    "power-plant": -2.86,
    "wine-quality-red": -0.96,
    "yacht": -0.37,
}
AUTHORS_CODE = {
    "boston": -2.45,
    "concrete": -3.09,
    "energy": -1.35,
    "kin8nm": 1.14,
    "power-plant": -2.83,
    "wine-quality-red": -0.99,
    "yacht": -0.07,
}
COLUMNS = [  # heading, method, what is scored
    ("MNVI, our recipe", "MNVI, ours", "single"),
    ("MNVI ours ×5", "MNVI, ours", "ensemble"),
    (PROTOCOL, PROTOCOL, "single"),
    ("MAP", "MAP", "single"),
    ("MAP ×5", "MAP", "ensemble"),
    ("MC dropout", "MC dropout", "single"),
    ("AutoNormal + Trace_ELBO", "AutoNormal + Trace_ELBO", "single"),
]
ABOUT = """\
Written by `benchmarks/uci.py`. Networks of 50 rectified hidden units predict mean and log-variance. Ten shuffled folds
(seed 1), the same for all methods. Mean over folds ± its standard error; log-likelihoods are per example, in the raw
units of the target, higher is better.

Paper's protocol: raw targets, SGD with momentum 0.9, learning rate 0.05 reduced tenfold at epochs 100 and 150 of 200,
KL weight 0.01, 0.1 and 1 in these stages, minibatches of 64 (kin8nm, power-plant, wine: 128), prior precision 0.1
(yacht: 0.01), gradients divided by their largest entry where that exceeds one, variances of hidden units at least 1e-5,
one Normal as the predictive distribution. One network a fold.

Our recipe and the peers share targets standardised by the training part, Adam with learning rate 0.02 and cosine decay,
{steps} steps, minibatches of 32 (kin8nm, power-plant: 64), N(0, 1) priors of the weights, none of the biases, and
log-likelihoods weighted by a power of the noise variance that falls from 1 to 0 over the first 60 % of the training.
KL weights rise from 0 over the first half. The one hyper-parameter of a method is chosen for each fold by the
log-likelihood of a fifth of its training part, held out (three times over for boston and yacht, where that is few
rows); then it trains on the whole part. MNVI predicts with a Gauss-Hermite mixture over the log-variance, MC dropout
and AutoNormal with mixtures of 100 draws. Where there are ensembles of five (×5, equal mixtures), scores of one network
are averages over the five."""


def write_report(rows: list[Row], path: Path) -> None:
    """Write every table that the results allow to ``path``."""
    if not rows:
        return
    by_key = {(row["set"], row["method"]): row for row in rows}
    sets = [name for name in PAPER if any(row["set"] == name for row in rows)]
    steps = ", ".join(f"{n:,}" for n in sorted({row["steps"] for row in rows if "steps" in row}))
    text = [ABOUT.format(steps=steps), "", environment(rows)]
    text += ["", "### Test log-likelihood", "", *table(by_key, sets, "log_likelihood")]
    text += ["", "### RMSE", "", *table(by_key, sets, "rmse")]
    text += ["", "### The paper's protocol against its published numbers", "", *reproduction(by_key, sets)]
    text += ["", "### Gain of our recipe", "", *gains(by_key, sets)]
    text += ["", "### Chosen hyper-parameters, and how many folds chose them", "", *choices(by_key, sets)]
    path.write_text("\n".join(text) + "\n")


def environment(rows: list[Row]) -> str:
    """One line on the machine and the time."""
    places = sorted({f"{row['cpu']}, {row['threads']} thread a run, torch {row['torch']}" for row in rows})
    minutes = sum(row["cpu_seconds"] for row in rows) / 60
    seeds = ", ".join(str(seed) for seed in sorted({row["seed"] for row in rows}))
    return f"{'; '.join(places)}; seed {seeds} (paper's protocol: 1). Processor time in all: {minutes:.0f} minutes."


def per_fold(
    by_key: dict[tuple[str, str], Row], name: str, method: str, what: str, score: str
) -> list[float]:
    row = by_key.get((name, method))
    return [] if row is None else [fold[what][score] for fold in row["folds"] if what in fold]


def spread(values: Iterable[float], digits: int = 2) -> str:
    values = list(values)
    if not values:
        return ""
    return f"{mean(values):.{digits}f} ± {standard_error(values):.{digits}f}"


def standard_error(values: list[float]) -> float:
    return stdev(values) / sqrt(len(values)) if len(values) > 1 else float("nan")


def table(by_key: dict[tuple[str, str], Row], sets: list[str], score: str) -> list[str]:
    lines = [
        f"| set | {' | '.join(heading for heading, _, _ in COLUMNS)} |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for name in sets:
        digits = 3 if score == "rmse" and name in ("kin8nm", "wine-quality-red", "energy", "yacht") else 2
        cells = [spread(per_fold(by_key, name, m, what, score), digits) for _, m, what in COLUMNS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def reproduction(by_key: dict[tuple[str, str], Row], sets: list[str]) -> list[str]:
    lines = [
        "| set | paper, Table 1 | authors' code | this library | to the paper, in standard errors | to the code | "
        "same networks, Gauss-Hermite mixture |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in sets:
        values = per_fold(by_key, name, PROTOCOL, "single", "log_likelihood")
        if not values:
            continue
        mixture = [fold["mixture_log_likelihood"] for fold in by_key[name, PROTOCOL]["folds"]]
        error = standard_error(values)
        published = f"{PAPER[name]} | {AUTHORS_CODE[name]}"
        distances = " | ".join(
            f"{(mean(values) - known[name]) / error:+.1f}" for known in (PAPER, AUTHORS_CODE)
        )
        lines.append(f"| {name} | {published} | {spread(values)} | {distances} | {spread(mixture)} |")
    return lines


def gains(by_key: dict[tuple[str, str], Row], sets: list[str]) -> list[str]:
    """Paired by fold against the best peer (by test log-likelihood, to its advantage)."""
    lines = [
        "| set | one network − authors' code | best peer | five networks − best peer, paired by fold |",
        "|---|---|---|---|",
    ]
    for name in sets:
        one = per_fold(by_key, name, "MNVI, ours", "single", "log_likelihood")
        five = per_fold(by_key, name, "MNVI, ours", "ensemble", "log_likelihood")
        peers = {
            heading: values
            for heading, method, what in COLUMNS[2:]
            if (values := per_fold(by_key, name, method, what, "log_likelihood"))
        }
        if not (one and peers):
            continue
        best = max(peers, key=lambda heading: mean(peers[heading]))
        paired = [a - b for a, b in zip(five, peers[best], strict=True)]
        gain = mean(one) - AUTHORS_CODE[name]
        lines.append(f"| {name} | {gain:+.2f} | {best} {mean(peers[best]):.3f} | {spread(paired, 3)} |")
    return lines


def choices(by_key: dict[tuple[str, str], Row], sets: list[str]) -> list[str]:
    example = {method: row for (_, method), row in by_key.items() if "tuned" in row}
    methods = [method for method in dict.fromkeys(method for _, method, _ in COLUMNS) if method in example]
    headings = [
        f"{method}: {example[method]['tuned']} among {', '.join(candidates_of(example[method]))}"
        for method in methods
    ]
    lines = [f"| set | {' | '.join(headings)} |", "|---" * (len(methods) + 1) + "|"]
    for name in sets:
        cells = []
        for method in methods:
            row = by_key.get((name, method))
            counts = Counter(fold["chosen"] for fold in row["folds"]) if row else Counter()
            cells.append(", ".join(f"{value:g} (×{count})" for value, count in sorted(counts.items())))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def candidates_of(row: Row) -> list[str]:
    return [f"{float(value):g}" for value in row["folds"][0]["validation"]]
