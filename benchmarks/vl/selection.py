# SPDX-License-Identifier: Apache-2.0
"""KL weight and checkpoint by validation NLL, for each method and seed; tables of what was chosen."""

from collections.abc import Callable, Iterable

from benchmarks.shared.benchmark import Row
from benchmarks.shared.tables import Paired, mean_sd, paired

METHODS = ("VL", "MAP", "VI")
RULES = {"mean": "at the mean", "samples": "10 samples"}
COLUMNS = ("nll", "ece", "accuracy", "nll_temperature_scaled")
LADDER = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
HEADER = [
    "| method | test NLL | ECE | accuracy | NLL, temperature-scaled | KL weight | epoch |",
    "|---|---|---|---|---|---|---|",
]


def weights_to_try(done: list[Row], lowest: float) -> list[float]:
    """KL weights of one method and seed: three, and the next one while a best one is at an end.

    ``dvi.tune`` does the same, but here each training is a run of its own, which scores several epochs.
    """
    first = LADDER.index(lowest)
    last = first + 2
    while True:
        tried = list(LADDER[first : last + 1])
        known = [row for row in done if row["kl_weight"] in tried]
        if {row["kl_weight"] for row in known} != set(tried):
            return tried
        chosen = [selected(known, rule) for rule in RULES]
        best = [row["kl_weight"] for row in chosen if row is not None]
        grown = max(first - (tried[0] in best), 0), min(last + (tried[-1] in best), len(LADDER) - 1)
        if grown == (first, last):
            return tried
        first, last = grown


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
    """The selected checkpoint of each seed."""
    chosen = {
        seed: selected([r for r in rows if r["seed"] == seed], rule) for seed in {r["seed"] for r in rows}
    }
    return {seed: row for seed, row in sorted(chosen.items()) if row is not None}


def comparison(
    rows: list[Row], methods: Iterable[str], keep: Callable[[Row], bool] = lambda row: True
) -> list[str]:
    """Lines of a table, a line for each method and prediction rule."""
    lines = list(HEADER)
    for method in methods:
        of_method = [row for row in rows if row["method"] == method and keep(row)]
        for rule, words in RULES.items():
            chosen = per_seed(of_method, rule)
            if chosen:
                lines.append(_line(f"{method}, {words}" if method != "MAP" else "MAP", chosen))
    return lines


def _line(label: str, chosen: dict[int, Row]) -> str:
    cells = [mean_sd([row[column] for row in chosen.values()]) for column in COLUMNS]
    weights = ", ".join(f"{w:g}" for w in sorted({row["kl_weight"] for row in chosen.values()}))
    epochs = ", ".join(str(row["epoch"]) for row in chosen.values())
    return f"| {label} | {' | '.join(cells)} | {weights} | {epochs} |"


def in_words(gap: Paired, what: str) -> str:
    """Say whether a difference holds, for the sentence that a report begins with."""
    if gap.count < 3:
        return f"{what} differs by {gap} with {gap.count} seed(s), which is not conclusive"
    if not gap.is_clear:
        return f"{what} does not differ clearly ({gap})"
    return f"{what} is {'lower' if gap.mean < 0 else 'higher'} ({gap})"


def differences(rows: list[Row]) -> list[str]:
    """Lines of a table: the NLL of each rival minus that of VL at the mean, paired by seed."""
    ours = per_seed([r for r in rows if r["method"] == "VL"], "mean")
    lines = [
        "| rival | NLL of the rival minus NLL of VL at the mean, per seed | mean ± half the 95 % interval |",
        "|---|---|---|",
    ]
    for method, rule in (("MAP", "mean"), ("VI", "mean"), ("VI", "samples")):
        theirs = per_seed([r for r in rows if r["method"] == method], rule)
        seeds = [seed for seed in ours if seed in theirs]
        if seeds:
            label = method if method == "MAP" else f"VI, {RULES[rule]}"
            a, b = ([part[seed]["nll"] for seed in seeds] for part in (theirs, ours))
            gains = ", ".join(f"{x - y:+.3f}" for x, y in zip(a, b, strict=True))
            lines.append(f"| {label} | {gains} | {paired(a, b)} |")
    return lines
