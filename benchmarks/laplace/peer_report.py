# SPDX-License-Identifier: Apache-2.0
"""The tables of peer.py."""

from pathlib import Path
from statistics import mean

from benchmarks.shared.benchmark import Row
from benchmarks.shared.tables import mean_sd, provenance, table

Groups = dict[tuple[str, str], list[Row]]  # by network and structure
WAYS = ("evidence", "validation")
NAMES = {"nll": "NLL", "ece": "ECE", "auroc": "AUROC", "memory_mib": "MiB"}

INTRODUCTION = """\
Both libraries start from the same trained weights, under standard normal priors, and take turns in one process with one
thread. The training data are a curve with a gap and known noise, and three clusters in four dimensions (200 rows
each, simulated for each seed), scikit-learn's digits (600), Fashion-MNIST (2,000) and CIFAR-10 (1,000; the ResNet-18 is
torchvision's, and only its last layer has a prior). There are 150 rows for validation and 250 for testing. Rows of the
tables without ± come from one seed.

One multiplier of the prior precision is tuned, with each method's own evidence or by the likelihood of the validation
rows on 7 values from 0.1 to 100,000. All methods use the probit link.

Cells show *pyro-dvi / laplace-torch*, means over seeds. Seconds are processor time on a shared machine, whose load
affects both libraries. The time of a prediction is the median of three predictions for 200 rows, after a first
one. Memory is the growth of the peak resident memory in MiB, while fitting, tuning with the evidence and predicting.
AUROC is for separating test inputs, by predictive entropy or variance, from inputs beyond the ends of the curve, wide
noise, digits rotated by 90 degrees, MNIST, or noise.

laplace-torch runs with its default settings, and hence with the Curvlinops backend, except for a single precision
(`prior_structure="scalar"`) and the loss on validation data, which is the mean NLL here: its default loss is a running
metric that is not reset between the values of the search. If its matrix has more than 2,000 rows, tuning with the
evidence was given 10 steps at rate 0.5 instead of 100 at rate 0.1, since each step computes a determinant; its time is
then a lower bound.
"""


def report(rows: list[Row], folder: Path) -> str:
    """Costs, losses, scores and distances."""
    groups: Groups = {}
    for row in rows:
        groups.setdefault((row["network"], row["structure"]), []).append(row)
    packages = ", ".join(sorted({row["packages"] for row in rows}))
    parts = [
        f"{provenance('laplace_torch', rows)} With {packages}.",
        INTRODUCTION.strip(),
        "## Time and memory",
        _costs(groups),
        _losses(groups),
        "## Scores",
        _scores(groups),
        "## Equal results, and the exact matrix",
        _distances(groups),
    ]
    return "\n\n".join(part.rstrip() for part in parts)


def _values(rows: list[Row], who: str, way: str, key: str) -> list[float]:
    return [row[f"{who}_{way}"][key] for row in rows]


def _ratio(rows: list[Row], way: str, key: str) -> float:
    ours, theirs = (mean(_values(rows, who, way, key)) for who in ("ours", "theirs"))
    return ours / theirs


def _costs(groups: Groups) -> str:
    header = (
        "network | structure | fit + tune with evidence, s | ratio | fit + tune on validation data, s | ratio | "
        "first prediction, ms | prediction, ms | ratio (range over seeds) | memory, MiB"
    )
    lines = []
    for (network, structure), rows in groups.items():
        cells = [network, structure]
        for way in WAYS:
            cells += [_pair(rows, way, "fit_and_tune"), f"{_ratio(rows, way, 'fit_and_tune'):.2f}"]
        single = [row["ours_evidence"]["predict"] / row["theirs_evidence"]["predict"] for row in rows]
        cells += [
            _pair(rows, "evidence", "first_prediction", 1000, "{:.0f}"),
            _pair(rows, "evidence", "predict", 1000, "{:.0f}"),
            f"{_ratio(rows, 'evidence', 'predict'):.2f} ({min(single):.2f} to {max(single):.2f})",
            _pair(rows, "evidence", "memory_mib", 1, "{:.0f}"),
        ]
        lines.append(cells)
    return table(header.split(" | "), lines)


def _pair(rows: list[Row], way: str, key: str, times: float = 1.0, form: str = "{:.2f}") -> str:
    return " / ".join(form.format(times * mean(_values(rows, who, way, key))) for who in ("ours", "theirs"))


def _losses(groups: Groups) -> str:
    """Every cell in which laplace-torch is better, by more than the digits shown."""
    wanted = [
        ("fit_and_tune", 1.0, "fit and tune with {way}: {ratio:.2f} times laplace-torch's time"),
        ("predict", 0.5, "prediction: {ratio:.2f} times laplace-torch's time (target: 0.5)"),
    ]
    found = [
        f"{network}, {structure}: {text.format(way=way, ratio=_ratio(rows, way, key))}"
        for (network, structure), rows in groups.items()
        for key, limit, text in wanted
        for way in WAYS
        if key in rows[0][f"ours_{way}"] and _ratio(rows, way, key) > limit
    ]
    compared = (("nll", 1, 0.005), ("ece", 1, 0.005), ("auroc", -1, 0.005), ("memory_mib", 1, 10))
    for (network, structure), rows in groups.items():
        for way in WAYS:
            for key, sign, margin in compared:
                if key not in rows[0][f"ours_{way}"]:  # no ECE of regressions
                    continue
                ours, theirs = (mean(_values(rows, who, way, key)) for who in ("ours", "theirs"))
                if sign * (ours - theirs) > margin:
                    found.append(
                        f"{network}, {structure}: {NAMES[key]}, tuned with {way}: {ours:.3g}, compared with "
                        f"{theirs:.3g}"
                    )
    lines = [f"- {line}." for line in found or ["nowhere"]]
    return "\n".join(["Where laplace-torch is better, or the target is missed:", "", *lines])


def _scores(groups: Groups) -> str:
    header = "network, structure, tuned by, precision, NLL, ECE, AUROC, log evidence, NLL of the mode"
    lines = []
    for (network, structure), rows in groups.items():
        for way in WAYS:
            cells = [network, structure, way, _pair(rows, way, "precision", 1, "{:.3g}")]
            for key in ("nll", "ece", "auroc"):
                known = key in rows[0][f"ours_{way}"]
                both = [mean_sd(_values(rows, who, way, key)) for who in ("ours", "theirs") if known]
                cells.append(" / ".join(both) or "–")
            cells += [
                _pair(rows, way, "log_evidence", 1, "{:.1f}"),
                f"{mean(row['mode']['nll'] for row in rows):.3f}",
            ]
            lines.append(cells)
    return table(header.split(", "), lines)


def _distances(groups: Groups) -> str:
    said = (
        "These values are for the training prior, seed 0 and 50 test inputs: the relative Frobenius distance between "
        "the output covariances of the two libraries, laplace-torch's log evidence minus ours, and the distance of "
        "each structure from the exact Gauss-Newton matrix, in covariance and log determinant."
    )
    header = (
        "network | structure | D | covariance, distance between libraries | log evidence, difference | "
        "covariance, distance from exact | log determinant minus the exact one"
    )
    lines = []
    for (network, structure), rows in groups.items():
        for row in rows:
            if "size" in row:
                known = "ours_from_exact" in row
                pairs = [
                    " / ".join(form.format(row[f"{who}_{key}"]) for who in ("ours", "theirs"))
                    if known
                    else "–"
                    for key, form in (("from_exact", "{:.3f}"), ("log_determinant", "{:+.1f}"))
                ]
                gaps = [f"{row['size']:,}", f"{row['variance_gap']:.1e}", f"{row['evidence_gap']:+.3g}"]
                lines.append([network, structure, *gaps, *pairs])
    return f"{said}\n\n{table(header.split(' | '), lines)}"
