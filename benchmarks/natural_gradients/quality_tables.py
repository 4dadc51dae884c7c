# SPDX-License-Identifier: Apache-2.0
"""The tables of `natural_quality`, from its lines."""

from collections.abc import Mapping
from math import isnan

from benchmarks.shared.benchmark import Row
from benchmarks.shared.tables import Paired, mean_sd, paired, provenance, table

DEFINITIONS = """\
VOGN, OGN and IVON run with the library's defaults, `VOGN({{}})`. MAP is `AutoDelta`, sampled VI `AutoNormal`, both with
`SampledELBO` and Adam, whose step size falls to zero as a cosine; MC dropout is MAP with dropout of 0.1. "mean":
predicted at the posterior mean; "sampled": by {draws} draws of the weights, or masks. Each method and rule has its own
KL weight, by the NLL of validation data with a seed that the tables do not use (`dvi.tune`).

NLL: mean negative log-likelihood of the test data in nats, of raw targets in regressions. ECE: 15 equally wide bins of
confidence. AUROC: of telling inputs of another kind from test images by the entropy of the prediction. ± behind a score
is the standard deviation over seeds, each with its own training and validation data, weights and batches; all seeds
share the test data. Differences of the NLL are paired by seed, mean ± standard error, bold where beyond two of them;
below zero the first has the lower NLL."""
PAIRS = (
    ("VOGN", "mean", "MAP", "mean"),
    ("VOGN", "mean", "sampled VI", "mean"),
    ("VOGN", "sampled", "MAP", "mean"),
    ("VOGN", "sampled", "sampled VI", "sampled"),
    ("IVON", "sampled", "VOGN", "sampled"),
    ("OGN", "mean", "VOGN", "mean"),
)


def text(rows: list[Row], tasks: list[str], compared: Mapping[str, tuple[str, ...]], draws: int) -> str:
    """Write what is compared on all tasks, and a section for each.

    Args:
        rows: lines of the benchmark.
        tasks: in the order of the sections.
        compared: methods with their prediction rules.
        draws: of a sampled prediction.
    """
    header = ["task", *(f"{a}, {rule}, minus {b}, {other}" for a, rule, b, other in PAIRS)]
    lines = [[task, *(difference(rows, task, *pair) for pair in PAIRS)] for task in tasks]
    lengths = [
        [task, *(longer(rows, task, rule) for rule in compared["VOGN"])]
        for task in tasks
        if tested(rows, task, "VOGN", "mean", 3)
    ]
    parts = [provenance("natural_quality", rows), DEFINITIONS.format(draws=draws)]
    parts += ["### Differences of the test NLL", table(header, [line for line in lines if any(line[1:])])]
    if lengths:
        title = "### VOGN after three times the epochs, minus after the usual, each at its own KL weight"
        parts += [title, table(["task", *compared["VOGN"]], lengths)]
    for task in tasks:
        parts += section(rows, task, compared)
    return "\n\n".join(part.rstrip("\n") for part in parts)


def best(tuning: Row, rule: str) -> float:
    """The KL weight with the lowest validation NLL by a prediction rule."""
    tried = [one for one in tuning["tried"] if not isnan(one.get(rule, float("nan")))]
    return float(min(tried, key=lambda one: one[rule])["kl_weight"])


def tuning_of(rows: list[Row], task: str, method: str, times: int) -> Row | None:
    """The line of the KL weights that were tried."""
    key = {"stage": "tune", "task": task, "method": method, "times": times}
    return next((row for row in rows if key.items() <= row.items()), None)


def tested(rows: list[Row], task: str, method: str, rule: str, times: int = 1) -> dict[int, Row]:
    """Scores by seed, at the KL weight that was chosen for this rule."""
    tuning = tuning_of(rows, task, method, times)
    if tuning is None:
        return {}
    key = {"stage": "test", "task": task, "method": method, "times": times, "kl_weight": best(tuning, rule)}
    found = [row for row in rows if key.items() <= row.items()]
    return {row["seed"]: row[rule] for row in sorted(found, key=lambda row: row["seed"])}


def difference(rows: list[Row], task: str, a: str, rule: str, b: str, other: str) -> Paired | None:
    """NLL of one method minus that of another."""
    return minus(tested(rows, task, a, rule), tested(rows, task, b, other))


def longer(rows: list[Row], task: str, rule: str) -> Paired | None:
    """NLL of VOGN after three times the epochs, minus that after the usual."""
    return minus(tested(rows, task, "VOGN", rule, 3), tested(rows, task, "VOGN", rule))


def minus(ours: dict[int, Row], theirs: dict[int, Row]) -> Paired | None:
    """Differences of the NLL by seed."""
    seeds = sorted(ours.keys() & theirs.keys())
    return paired(*([part[seed]["nll"] for seed in seeds] for part in (ours, theirs))) if seeds else None


def section(rows: list[Row], task: str, compared: Mapping[str, tuple[str, ...]]) -> list[str]:
    """The table of one task, and what the KL weights were chosen from."""
    lines, tried, columns = [], [], []
    for method, rules in compared.items():
        for rule in rules:
            found, tuning = tested(rows, task, method, rule), tuning_of(rows, task, method, 1)
            if not found or tuning is None:
                continue
            columns = list(next(iter(found.values())))
            cells = [mean_sd([row[column] for row in found.values()]) for column in columns]
            lines.append([f"{method}, {rule}", f"{best(tuning, rule):g}", *cells])
            shown = (f"{one['kl_weight']:g} → {one[rule]:.3f}" for one in tuning["tried"] if rule in one)
            tried.append(f"{method}, {rule}: {', '.join(shown)}")
    if not lines:
        return []
    names = {"nll": "NLL", "ece": "ECE"}
    header = ["method", "KL weight", *(names.get(column, column) for column in columns)]
    return [f"### {task}", table(header, lines), f"Validation NLL by KL weight. {'; '.join(tried)}."]
