# SPDX-License-Identifier: Apache-2.0
"""The tables of laplace_torch.py, from its result lines."""

import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

Row = dict[str, Any]
WAYS = ("evidence", "validation")
NAMES = {"nll": "NLL", "ece": "ECE", "auroc": "AUROC", "memory_mib": "MiB"}

INTRODUCTION = """\
Written by `benchmarks/laplace_torch.py`, words and all. Both libraries start from the same trained weights, under
standard normal priors, and take turns in one process with one thread. Data: scikit-learn's digits (600 images to
train), Fashion-MNIST (2,000) and CIFAR-10 (1,000; the ResNet-18 is torchvision's, and only its last layer has a prior);
150 images validate, 250 test. Rows without ± are of one seed.

One multiplier of the prior precision is tuned, by each method's own evidence or by the
likelihood of the validation images on 7 values from 0.1 to 100,000. Probit link.

Cells are *ours / laplace-torch*, means over seeds. Seconds are processor time; those of a prediction are the median of
three for 200 images, after a first one. Memory is by how much the resident memory grows at its peak, in MiB, while
fitting, tuning by evidence and predicting. AUROC tells test images from others by predictive entropy: digits turned by
90 degrees, MNIST, or noise.

laplace-torch has its own defaults but for one precision (`prior_structure="scalar"`), and BackPACK for whole
convolutional networks. Where its matrix has more than 2,000 rows, its tuning by evidence got 10 steps of 0.5 in place
of 100 of 0.1, since each takes a determinant: its time there is a lower bound.
"""


def write_report(results: Path) -> None:
    """Write the tables beside the results."""
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["network"], row["structure"]), []).append(row)
    lines = [
        INTRODUCTION,
        *["## Time and memory", "", *_costs(groups), "", *_losses(groups), ""],
        *["## Scores", "", *_scores(groups), ""],
        *["## Equal results, and the exact matrix", "", *_distances(groups), ""],
        f"{rows[0]['machine']}; seeds {', '.join(map(str, sorted({row['seed'] for row in rows})))}"
        + ("; a quick check on few images." if rows[0]["quick"] else "."),
    ]
    results.with_suffix(".md").write_text("\n".join(lines) + "\n")


def _values(rows: list[Row], who: str, way: str, key: str) -> list[float]:
    return [row[f"{who}_{way}"][key] for row in rows]


def _ratio(rows: list[Row], way: str, key: str) -> float:
    ours, theirs = (mean(_values(rows, who, way, key)) for who in ("ours", "theirs"))
    return ours / theirs


def _costs(groups: dict[tuple[str, str], list[Row]]) -> list[str]:
    lines = [
        "| network | structure | fit + tune by evidence, s | ratio | fit + tune by validation, s | ratio | "
        "first prediction, ms | prediction, ms | ratio (range over seeds) | memory, MiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
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
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _pair(rows: list[Row], way: str, key: str, times: float = 1.0, form: str = "{:.2f}") -> str:
    return " / ".join(form.format(times * mean(_values(rows, who, way, key))) for who in ("ours", "theirs"))


def _losses(groups: dict[tuple[str, str], list[Row]]) -> list[str]:
    """Every cell in which laplace-torch is better, by more than the digits shown."""
    wanted = [
        ("fit_and_tune", 1.0, "fit and tune by {way}, {ratio:.2f} of their time"),
        ("predict", 0.5, "prediction, {ratio:.2f} of their time (the aim is 0.5)"),
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
                ours, theirs = (mean(_values(rows, who, way, key)) for who in ("ours", "theirs"))
                if sign * (ours - theirs) > margin:
                    found.append(
                        f"{network}, {structure}: {NAMES[key]} by {way}, {ours:.3g} against {theirs:.3g}"
                    )
    return [
        "Where laplace-torch is better, or the aim is missed:",
        "",
        *(f"- {line}." for line in found or ["nowhere"]),
    ]


def _scores(groups: dict[tuple[str, str], list[Row]]) -> list[str]:
    lines = [
        "| network | structure | tuned by | precision | NLL | ECE | AUROC | log evidence | NLL of the mode |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (network, structure), rows in groups.items():
        for way in WAYS:
            cells = [network, structure, way, _pair(rows, way, "precision", 1, "{:.3g}")]
            for key in ("nll", "ece", "auroc"):
                cells.append(" / ".join(_spread(_values(rows, who, way, key)) for who in ("ours", "theirs")))
            cells += [
                _pair(rows, way, "log_evidence", 1, "{:.1f}"),
                f"{mean(row['mode']['nll'] for row in rows):.3f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _spread(values: list[float]) -> str:
    return f"{mean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def _distances(groups: dict[tuple[str, str], list[Row]]) -> list[str]:
    lines = [
        "With the prior of training, seed 0, on 50 test images: the relative Frobenius distance between the "
        "covariances of logits of both libraries; their log evidence less ours; and how far each structure is from "
        "the exact Gauss-Newton matrix, in covariance and log determinant.",
        "",
        "| network | structure | D | covariance, ours to theirs | log evidence | covariance from exact | "
        "log determinant less the exact one |",
        "|---|---|---|---|---|---|---|",
    ]
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
                lines.append(
                    f"| {network} | {structure} | {row['size']:,} | {row['variance_gap']:.1e} | "
                    f"{row['evidence_gap']:+.3g} | {' | '.join(pairs)} |"
                )
    return lines
