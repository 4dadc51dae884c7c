# SPDX-License-Identifier: Apache-2.0
"""The tables of `moments_images`, from its lines."""

from collections.abc import Mapping, Sequence

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
TITLES = {
    "digits": "Digits",
    "mnist_5000": "MNIST, 5,000 images",
    "mnist": "MNIST",
    "mnist_50_epochs": "MNIST, 50 epochs",
}
OURS = ("MNVI", "mean-field moments")

DEFINITIONS = """\
Scores of the test images; lower is better in all of them. NLL: mean negative log-likelihood in nats. ECE: 20 equally
wide bins of confidence. MR@k: the misclassified share of what is left when the k % of the images with the highest
predictive entropy are rejected; AUMRC: the area under the curve of these shares (`dvi.metrics.aumrc`). ± is the
standard deviation over seeds, each with its own training and validation images, initial weights and batches; all seeds
share the test images.

Networks: a perceptron 64-50-50-10 on digits (500 training, 300 validation and 899 test images), LeNet-5 on MNIST
(5,000, 1,000 and 5,000 images, or 55,000, 5,000 and 10,000), all with ReLU. MNVI and mean-field moments (deterministic
VI, dDVI) predict by `Moments()` in one pass, MAP at its weights, MC dropout by 20 random masks, sampled VI by 20 draws
of the weights. All methods have He priors and Adam with the same step size, which falls to zero as a cosine and is ten
times larger for posterior scales. Each method has its own KL weight by `dvi.tune` (MC dropout one for each
dropout rate), by the NLL of validation images with a seed that the table does not use; the runs with all of MNIST take
over the weights of its 5,000 images."""


def text(rows: list[Row], epochs: Mapping[str, int], compared: Sequence[str]) -> str:
    """Write a section for each task.

    Args:
        rows: lines of the benchmark.
        epochs: of each task.
        compared: the methods, in the order of the tables.
    """
    parts = [provenance("moments_images", rows), DEFINITIONS]
    for task, last in epochs.items():
        tests = [row for row in rows if row["stage"] == "test" and row["task"] == task]
        methods = [method for method in compared if any(row["method"] == method for row in tests)]
        if methods:
            seeds = len({row["seed"] for row in tests})
            parts += [f"### {TITLES[task]}", f"{seeds} seed{'s' * (seeds > 1)}, {last} epochs."]
            parts += [_scores(tests, methods), *_differences(tests, methods)]
            parts += _tried([row for row in rows if row["stage"] == "tune" and row["task"] == task], methods)
    return "\n\n".join(part.rstrip("\n") for part in parts)


def _of(tests: list[Row], method: str) -> list[Row]:
    return sorted((row for row in tests if row["method"] == method), key=lambda row: row["seed"])


def _scores(tests: list[Row], methods: list[str]) -> str:
    header = ["method", *(heading for heading, _ in SCORES.values())]
    header += ["parameters", "KL weight", "dropout"]
    lines = []
    for method in methods:
        chosen = _of(tests, method)
        row = chosen[0]
        lines.append(
            [
                method,
                *(mean_sd([factor * r[score] for r in chosen]) for score, (_, factor) in SCORES.items()),
                f"{row['parameters']:,}",
                f"{row['kl_weight']:g}",
                f"{row['dropout']:g}" if row["dropout"] else None,
            ]
        )
    return table(header, lines)


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
                sentences.append(f"{ours} against {theirs}: {', '.join(clear) or 'no clear difference'}.")
    if not lines:
        return []
    header = ["of", "minus", *(heading for heading, _ in SCORES.values())]
    about = (
        "Differences, paired by seed, ± half their 95 % interval (Student's t); bold where it leaves out "
        "zero."
    )
    single = "One seed: differences between methods are leads, no findings." if not sentences else ""
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
    return ["Validation NLL by KL weight, one seed:", "\n".join(lines)] if lines else []
