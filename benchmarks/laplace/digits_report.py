# SPDX-License-Identifier: Apache-2.0
"""The tables of digits.py, and what the rows say."""

from pathlib import Path
from statistics import mean

from benchmarks.shared.benchmark import Row
from benchmarks.shared.tables import mean_sd, provenance, table

Groups = dict[tuple[str, str], dict[int, Row]]  # by method and tuning, then by seed
FOREIGN = ("noise", "permuted", "rotated")
SCORES = ("nll", "ece", "accuracy", *(f"auroc_{name}" for name in FOREIGN))
NAMES = {"mlp": "64-100-10, rectified (D = 7,510)", "cnn": "two convolutions and a dense layer (D = 3,818)"}
FAST, REFERENCE, PEER_FULL = "PosteriorSamples(256)", "Dense", "laplace-torch full"
TIGHT = 1000  # times the precision of training

INTRODUCTION = """\
Scikit-learn's digits are split by seed into 1,000 for training, 297 for validation and 500 for testing. Networks are
trained to the mode under N(0, 1) priors, and every method starts from the same weights. One multiplier of the prior
precision is tuned with fixed weights, by the evidence or by the validation likelihood on 13 values from 0.01 to 10,000.
In both libraries, each method computes the evidence with its own precision. All methods use the probit link. AUROC is
for separating the test digits, by predictive entropy, from equally many images of uniform noise, with permuted pixels,
or rotated by 90 degrees. Scores are means over seeds ± standard deviation; the column "seeds" has their number.

Seconds are *processor time of one thread* (for fit and tuning, and for predicting 2,000 images). The machine was
shared, which also affects processor time, so small ratios mean little. Memory is the increase in the peak memory of the
process. Time and memory include the first use of each library.

laplace-torch runs with its default settings, except for `prior_structure="scalar"` and, for the convolutional network,
the backend BackPACK, which is much faster there. With the full matrix, it computes a determinant in every tuning step;
it was given 10 steps at rate 0.5 instead of its 100 at rate 0.1, so its time is *a lower bound*.
"""


def report(rows: list[Row], folder: Path) -> str:
    """A section for each network."""
    parts = [provenance("laplace_quality", rows), INTRODUCTION.strip()]
    for network, title in NAMES.items():
        found: Groups = {}
        for row in rows:
            if row["network"] == network:
                found.setdefault((row["method"], row["tuning"]), {})[row["seed"]] = row
        if found:
            lines = [*_foreign(found), *_mode(found, "evidence"), *_mode(found, "validation")]
            parts += [f"## {title}", _scores(found), "\n".join(lines)]
    return "\n\n".join(parts)


def _scores(groups: Groups) -> str:
    header = (
        "method, tuned by, seeds, precision, NLL, ECE, accuracy, noise, permuted, rotated, fit + tune (s), "
    )
    lines = []
    for (method, tuning), by_seed in sorted(groups.items(), key=_order):
        found = list(by_seed.values())
        precision = ", ".join(f"{row['precision']:.3g}" for row in found)
        times = [
            f"{mean(row['seconds'].get(phase, 0.0) for row in found):.3g}"
            for phase in ("fit and tune", "predict")
        ]
        memory = f"{mean(row['memory_mib'] for row in found):.0f}"
        spreads = [mean_sd([row[score] for row in found]) for score in SCORES]
        lines.append([method, tuning, len(found), precision, *spreads, *times, memory])
    return table((header + "predict (s), MiB").split(", "), lines).rstrip()


def _order(item: tuple[tuple[str, str], dict[int, Row]]) -> tuple[int, str, str]:
    (method, tuning), _ = item
    return (0 if method == "MAP" else 2 if method == PEER_FULL else 1, tuning, method)


def _foreign(found: Groups) -> list[str]:
    """How near the fast method comes to the full matrix: the peer's, and ours, which is the same matrix."""
    lines = []
    for other in (PEER_FULL, REFERENCE):
        fast, full = found.get((FAST, "evidence"), {}), found.get((other, "evidence"), {})
        seeds = sorted(fast.keys() & full.keys())
        if not seeds:
            continue
        keys = [f"auroc_{name}" for name in FOREIGN]
        worst = {key: max((fast[s][key] - full[s][key] for s in seeds), key=abs) for key in keys}
        differences = ", ".join(f"{key.removeprefix('auroc_')} {d:+.4f}" for key, d in worst.items())
        met = all(abs(d) <= 0.005 for d in worst.values())
        ratio = min(_seconds(full[s]) / _seconds(fast[s]) for s in seeds)
        target = f" (target: 50, **{'met' if ratio >= 50 else 'missed'}**)" if other == PEER_FULL else ""
        lines.append(
            f"- {FAST} compared with {other}, both tuned with the evidence, {len(seeds)} seed(s): largest AUROC "
            f"difference {differences} (target: within 0.005, **{'met' if met else 'missed'}**); {other} takes "
            f"at least {ratio:.1f} times as long{target}."
        )
    return lines


def _seconds(row: Row) -> float:
    return float(sum(row["seconds"].values()))


def _mode(found: Groups, tuning: str) -> list[str]:
    """What is gained or lost against the mode itself, on the seeds that both sides have."""
    point = found.get(("MAP", "none"), {})
    gains, tight = [], 0
    for (_, how), by_seed in found.items():
        seeds = by_seed.keys() & point.keys()
        if how == tuning and seeds:
            gains.append(mean(point[s]["nll"] - by_seed[s]["nll"] for s in seeds))
            tight += all(by_seed[s]["precision"] >= TIGHT for s in seeds)
    if not gains:
        return []
    better = sum(gain > 0 for gain in gains)
    said = f"- Tuned with {tuning}, {better} of {len(gains)} methods have a better NLL than the mode alone"
    if tight:
        said += f"; for {tight} the chosen precision is {TIGHT:,} or more, where the Gaussian is almost a point mass"
    return [said + "."]
