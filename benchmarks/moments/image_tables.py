# SPDX-License-Identifier: Apache-2.0
"""The tables of `moments_images` and `mnvi_lenet`, from their lines."""

from collections.abc import Sequence

from benchmarks.shared.benchmark import Row
from benchmarks.shared.tables import mean_sd, paired, provenance, table

SCORES = {
    "error": ("error, %", 100),
    "nll": ("NLL", 1),
    "ece": ("ECE, %", 100),
    "aumrc": ("AUMRC, %", 100),
    "mr10": ("MR@10, %", 100),
    "mr25": ("MR@25, %", 100),
    "mr50": ("MR@50, %", 100),
}
OURS = ("MNVI", "mean-field moments", "MFVI")

DEFINITIONS = """\
All scores are computed on the test images, and lower is better for all of them. NLL: mean negative log-likelihood in
nats. ECE: with 20 equally wide bins of confidence. MR@k: the error rate on the remaining images when the k % with the
highest predictive entropy are rejected. AUMRC: the area under the curve of these error rates (`dvi.metrics.aumrc`). ±
is the standard deviation over seeds, each with its own training and validation images, initial weights and batches; all
seeds share the test images.

"""
ABOUT_DIGITS = """\
Digits: a perceptron 64-50-50-10 with ReLU; 500 training, 300 validation and 899 test images. MNVI and mean-field
moments (deterministic VI, dDVI) predict with `Moments()` in one pass, MAP at its weights, MC dropout with 20 random
masks, and sampled VI with 20 posterior samples. All methods have He priors and Adam with the same step size, which
decays to zero along a cosine and is ten times larger for posterior scales. `dvi.tune` chose the KL weight of each
method (for MC dropout, one for each dropout rate) by the NLL of validation images, with a seed that the table does not
use."""
ABOUT_LENET = """\
LeNet on MNIST: 5 x 5 convolutions of 32 and 64 channels and 1,024 hidden units, ReLU. {train:,} training and
{test:,} test images, {epochs} epochs in minibatches of 64; posterior scales have {rate:g} times the step size of the
means. The paper has 55,000 and 10,000 images, 20 epochs and equal step sizes. Priors have precision 1,000. Training
uses Adam with AMSGrad and a step size of .001, which falls tenfold after half of the training; gradients of the mean
loss are scaled down if their largest entry exceeds .1. MNVI and MFVI (a mean-field posterior trained with moments,
which starts at the prior) have the paper's KL weights; MAP and MC dropout have the KL weight of MNVI. MNVI and MFVI
predict with `Moments()` in one pass, MAP at its weights, and MC dropout with eight random masks, with a rate of
{dropout:g} that we chose. Time: the processor time of predictions for 500 images, relative to one pass of the same
network at the mean; the median of five alternating measurements."""


def digits(rows: list[Row], epochs: int, compared: Sequence[str]) -> str:
    """The report of `moments_images`.

    Args:
        rows: lines of the benchmark.
        epochs: of training.
        compared: the methods, in the order of the tables.
    """
    tests = [row for row in rows if row["stage"] == "test"]
    methods = [method for method in compared if any(row["method"] == method for row in tests)]
    parts = [provenance("moments_images", rows), DEFINITIONS + ABOUT_DIGITS]
    parts.append(f"{len({row['seed'] for row in tests})} seeds, {epochs} epochs.")
    parts += [_scores(tests, methods), *_differences(tests, methods)]
    parts += _tried([row for row in rows if row["stage"] == "tune"], methods)
    return "\n\n".join(part.rstrip("\n") for part in parts)


def lenet(rows: list[Row], dropout: float) -> str:
    """The report of `mnvi_lenet`: the lines of one size.

    Args:
        rows: lines of the benchmark.
        dropout: the rate.
    """
    methods = list(dict.fromkeys(row["method"] for row in rows))
    sizes = {"train": rows[0]["num_train"], "test": rows[0]["num_test"], "epochs": rows[0]["epochs"]}
    sizes |= {"rate": rows[0]["scale_rate"], "dropout": dropout}
    parts = [provenance("mnvi_lenet", rows), DEFINITIONS + ABOUT_LENET.format(**sizes)]
    parts += [_scores(rows, methods), *_differences(rows, methods)]
    return "\n\n".join(part.rstrip("\n") for part in parts)


def _of(tests: list[Row], method: str) -> list[Row]:
    return sorted((row for row in tests if row["method"] == method), key=lambda row: row["seed"])


def _scores(tests: list[Row], methods: list[str]) -> str:
    others = {"parameters": "parameters", "kl_weight": "KL weight", "dropout": "dropout"}
    others |= {"relative_time": "time"}
    others = {key: heading for key, heading in others.items() if key in tests[0]}
    header = ["method", *(heading for heading, _ in SCORES.values()), *others.values()]
    lines = []
    for method in methods:
        chosen = _of(tests, method)
        cells = [mean_sd([factor * r[score] for r in chosen]) for score, (_, factor) in SCORES.items()]
        lines.append([method, *cells, *(_setting(chosen, key) for key in others)])
    return table(header, lines)


def _setting(rows: list[Row], key: str) -> str | None:
    value = rows[0][key]
    if key == "relative_time":
        return mean_sd([row[key] for row in rows], 1)
    return f"{value:,}" if key == "parameters" else f"{value:g}" if value else None


def _differences(tests: list[Row], methods: list[str]) -> list[str]:
    """Ours minus theirs seed by seed, and in words what is clear."""
    lines, sentences = [], []
    for ours in OURS:
        for theirs in methods:
            if theirs in OURS or ours not in methods:
                continue
            mine, other = _of(tests, ours), _of(tests, theirs)
            seeds = {row["seed"] for row in mine} & {row["seed"] for row in other}
            if not seeds:
                continue
            cells = {}
            for score, (heading, factor) in SCORES.items():
                values = [[factor * r[score] for r in rows if r["seed"] in seeds] for rows in (mine, other)]
                cells[heading.removesuffix(", %")] = paired(*values)
            lines.append([ours, theirs, *cells.values()])
            clear = [
                f"{'lower' if c.mean < 0 else 'higher'} {name}" for name, c in cells.items() if c.is_clear
            ]
            count = next(iter(cells.values())).count
            if count > 2:
                sentences.append(
                    f"{ours} compared with {theirs}: {', '.join(clear) or 'no clear difference'}."
                )
    if not lines:
        return []
    header = ["method", "minus", *(heading for heading, _ in SCORES.values())]
    about = (
        "Differences, paired by seed, ± half the 95 % interval (Student's t); bold if the interval excludes "
        "zero."
    )
    single = "With one seed, differences between methods are not conclusive." if not sentences else ""
    return [about, table(header, lines), " ".join(sentences) or single]


def _tried(tunings: list[Row], methods: list[str]) -> list[str]:
    """Validation NLL of all settings that were tried."""
    lines = []
    for row in sorted(tunings, key=lambda row: methods.index(row["method"])):
        cells = [
            f"{weight:g}{f' with dropout {dropout:g}' if dropout else ''}: {nll:.4f}"
            for dropout, weight, nll in row["tried"]
        ]
        lines.append(f"- {row['method']}: {', '.join(cells)}")
    return ["Validation NLL for each KL weight, one seed:", "\n".join(lines)] if lines else []
