# SPDX-License-Identifier: Apache-2.0
"""The tables of `uci`, from its lines."""

from collections import Counter
from itertools import product
from math import sqrt
from statistics import mean, stdev

from benchmarks.shared.benchmark import Row
from benchmarks.shared.tables import mean_sd, paired, provenance, table

PROTOCOL = "MNVI, paper's protocol"
DVI = "DVI (full covariance)"
EB, FIXED = "DVI, empirical Bayes", "DVI, KL weight 1"
BY_MOMENTS = ("MNVI, ours", "mean-field moments", DVI, EB, FIXED)
FAMILIES = (("MNVI, ours", "mean-field moments"), ("MNVI, ours", DVI), (DVI, "mean-field moments"))
UNTUNED = ((EB, DVI), (EB, FIXED), (EB, "MNVI, ours"))

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
# Heading, method, what is scored.
COLUMNS = [
    ("MNVI, our recipe", "MNVI, ours", "single"),
    ("MNVI ours ×5", "MNVI, ours", "ensemble"),
    ("mean-field moments", "mean-field moments", "single"),
    ("mean-field moments ×5", "mean-field moments", "ensemble"),
    (DVI, DVI, "single"),
    (f"{DVI} ×5", DVI, "ensemble"),
    (EB, EB, "single"),
    (f"{EB} ×5", EB, "ensemble"),
    (FIXED, FIXED, "single"),
    (f"{FIXED} ×5", FIXED, "ensemble"),
    (PROTOCOL, PROTOCOL, "single"),
    ("MAP", "MAP", "single"),
    ("MAP ×5", "MAP", "ensemble"),
    ("MC dropout", "MC dropout", "single"),
    ("AutoNormal + Trace_ELBO", "AutoNormal + Trace_ELBO", "single"),
]
ABOUT = """\
Networks of 50 ReLU units predict the mean and the log-variance. All methods use the same ten shuffled folds. Scores are
means over folds ± their standard error, {seeds}. Log-likelihoods are per example, in the raw units of the target;
higher is better.

The paper's protocol: raw targets, SGD with momentum 0.9, learning rate 0.05 reduced tenfold at epochs 100 and 150 of
200, KL weight 0.01, 0.1 and 1 in these stages, minibatches of 64 (kin8nm, power-plant, wine: 128), prior precision 0.1
(yacht: 0.01), gradients divided by their largest entry if it exceeds one, variances of hidden units of at least 1e-5, a
single Normal as the predictive distribution, and one network per fold.

Our recipe, also used for the peers: targets standardised on the training part, Adam with learning rate 0.02 and cosine
decay, {steps} steps, minibatches of 32 (kin8nm, power-plant: 64), N(0, 1) priors on the weights and no priors on the
biases, and log-likelihoods weighted by a power of the noise variance, with an exponent that falls from 1 to 0 over the
first 60 % of training. KL weights rise from 0 over the first half. Each method has one hyperparameter. For each fold,
it is chosen by the log-likelihood of a held-out fifth of the training part (for boston and yacht, which are small, of
three such fifths); then the method trains on the whole part. MNVI and mean-field moments (deterministic VI, dDVI:
MeanFieldGuide in place of MultiplicativeNoiseGuide, and otherwise identical) predict with a Gauss-Hermite mixture over
the log-variance; MC dropout and AutoNormal predict with mixtures of 100 samples. Where there are ensembles of five (×5,
equal mixtures), the scores of one network are averages over the five."""
ABOUT_DVI = """

DVI is mean-field moments with covariances between activations. With one hidden layer and inputs without noise, the
hidden units are independent, and the only covariance is that of the two outputs, mean and log-variance."""
ABOUT_EB = """

Two versions of DVI tune nothing: no rows are held out, and the KL weight is 1. With empirical Bayes, the prior variance
of each weight tensor is optimal given the posterior, under an inverse-Gamma prior with α = 4.4798 and mode 1. The other
version keeps the N(0, 1) prior."""


class Scores:
    """Scores by set, method, what is scored, and fold.

    Args:
        rows: lines of the benchmark.
    """

    def __init__(self, rows: list[Row]) -> None:
        self.rows = sorted(rows, key=lambda row: row["seed"])
        self.columns = [column for column in COLUMNS if any(row["method"] == column[1] for row in rows)]
        self.sets = [name for name in PAPER if any(row["set"] == name for row in rows)]

    def by_seed(self, name: str, method: str, what: str, score: str) -> list[list[float]]:
        """For each seed the score of each fold."""
        found = [row["folds"] for row in self.rows if (row["set"], row["method"]) == (name, method)]
        return [[fold[what][score] for fold in folds] for folds in found if what in folds[0]]

    def by_fold(
        self, name: str, method: str, what: str = "single", score: str = "log_likelihood"
    ) -> list[float]:
        """Of each fold the mean over seeds; empty if there is no line."""
        return [mean(fold) for fold in zip(*self.by_seed(name, method, what, score), strict=True)]


def tables(rows: list[Row]) -> str:
    """Return every table that the results allow."""
    scores = Scores(rows)
    steps = ", ".join(f"{n:,}" for n in sorted({row["steps"] for row in rows if "steps" in row}))
    sections = {
        "Test log-likelihood": scored(scores, "log_likelihood"),
        "RMSE": scored(scores, "rmse"),
        "Spread of the mean log-likelihood over seeds": seeds(scores),
        "The paper's protocol compared with its published results": reproduction(scores),
        "Multiplicative noise, mean-field moments and DVI compared": families(scores, FAMILIES),
        "DVI with empirical Bayes, without tuning": families(scores, UNTUNED),
        "Improvement with our recipe": gains(scores),
        "Chosen hyperparameters, and the number of folds that chose them": choices(scores),
    }
    about = ABOUT.format(steps=steps, seeds=_seeds_in_words(rows))
    about += ABOUT_DVI if any(row["method"] == DVI for row in rows) else ""
    about += ABOUT_EB if any(row["method"] == EB for row in rows) else ""
    text = [provenance("uci", rows), about]
    return "\n\n".join([*text, *(f"### {title}\n\n{part}" for title, part in sections.items() if part)])


def _seeds_in_words(rows: list[Row]) -> str:
    """How many seeds the scores of a fold are means over."""
    counts = [len({row["seed"] for row in rows if row["set"] == name}) for name in PAPER]
    if max(counts) == 1:
        return "one seed"
    some = ", ".join(name for name, count in zip(PAPER, counts, strict=True) if count > 1)
    return f"where a fold's scores are means over up to {max(counts)} seeds ({some})"


def spread(values: list[float], digits: int = 2) -> str | None:
    """Mean and its standard error."""
    if not values:
        return None
    error = stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
    return f"{mean(values):.{digits}f} ± {error:.{digits}f}"


def scored(scores: Scores, score: str) -> str:
    lines = []
    for name in scores.sets:
        digits = 3 if score == "rmse" and name in ("kin8nm", "wine-quality-red", "energy", "yacht") else 2
        cells = [spread(scores.by_fold(name, m, what, score), digits) for _, m, what in scores.columns]
        lines.append([name, *cells])
    return table(["set", *(heading for heading, _, _ in scores.columns)], lines)


def seeds(scores: Scores) -> str:
    """Mean over folds, then mean and standard deviation over seeds, where there are several."""
    columns: dict[str, list[str | None]] = {}
    for heading, method, what in scores.columns:
        found = [scores.by_seed(name, method, what, "log_likelihood") for name in scores.sets]
        cells = [mean_sd([mean(folds) for folds in own]) if len(own) > 1 else None for own in found]
        columns |= {heading: cells} if any(cells) else {}
    lines = [
        [name, *cells] for name, *cells in zip(scores.sets, *columns.values(), strict=True) if any(cells)
    ]
    return table(["set", *columns], lines) if lines else ""


def reproduction(scores: Scores) -> str:
    header = [
        "set",
        "paper, Table 1",
        "authors' code",
        "this library",
        "distance from the paper, in standard errors",
    ]
    header += ["distance from the code, in standard errors", "same networks, Gauss-Hermite mixture"]
    lines = []
    for name in scores.sets:
        values = scores.by_fold(name, PROTOCOL)
        if not values:
            continue
        found = [row["folds"] for row in scores.rows if (row["set"], row["method"]) == (name, PROTOCOL)]
        mixtures = [[fold["mixture_log_likelihood"] for fold in folds] for folds in found]
        mixture = [mean(fold) for fold in zip(*mixtures, strict=True)]
        error = stdev(values) / sqrt(len(values))
        distances = [f"{(mean(values) - known[name]) / error:+.1f}" for known in (PAPER, AUTHORS_CODE)]
        lines.append([name, PAPER[name], AUTHORS_CODE[name], spread(values), *distances, spread(mixture)])
    about = "The results of the authors' code were copied from runs whose records were not kept.\n\n"
    return about + table(header, lines) if lines else ""


def families(scores: Scores, pairs: tuple[tuple[str, str], ...]) -> str:
    """Posteriors by moments against each other, fold by fold."""
    names = {"MNVI, ours": "MNVI", DVI: "DVI", EB: "empirical Bayes", FIXED: "DVI at KL weight 1"}
    kinds = {"one network": "single", "five networks": "ensemble"}
    lines = []
    for name in scores.sets:
        cells = []
        for (ours, theirs), what in product(pairs, kinds.values()):
            pair = [scores.by_fold(name, m, what) for m in (ours, theirs)]
            cells.append(paired(*pair) if all(pair) else None)
        lines += [[name, *cells]] if any(cells) else []
    about = "Difference of log-likelihoods, paired by fold, ± half the 95 % interval; bold if it excludes zero.\n\n"
    headings = [
        f"{names.get(ours, ours)} minus {names.get(theirs, theirs)}, {kind}"
        for (ours, theirs), kind in product(pairs, kinds)
    ]
    return about + table(["set", *headings], lines) if lines else ""


def gains(scores: Scores) -> str:
    """Paired by fold against the highest peer (by test log-likelihood, to its advantage)."""
    lines = []
    for name in scores.sets:
        one = scores.by_fold(name, "MNVI, ours")
        five = scores.by_fold(name, "MNVI, ours", "ensemble")
        others = [column for column in scores.columns if column[1] not in BY_MOMENTS]
        found = {heading: scores.by_fold(name, m, what) for heading, m, what in others}
        peers = {heading: values for heading, values in found.items() if values}
        if one and peers:
            best = max(peers, key=lambda heading: mean(peers[heading]))
            gain = mean(one) - AUTHORS_CODE[name]
            lines.append([name, f"{gain:+.2f}", f"{best} {mean(peers[best]):.3f}", paired(five, peers[best])])
    header = [
        "set",
        "one network − authors' code",
        "best peer",
        "five networks − best peer, paired by fold",
    ]
    about = (
        "± is half the 95 % interval; bold if it excludes zero. Peers are all methods except moment methods with our "
        "recipe.\n\n"
    )
    return about + table(header, lines)


def choices(scores: Scores) -> str:
    tuned = {row["method"]: row for row in scores.rows if "tuned" in row}
    headings, lines = [], []
    for method, row in tuned.items():
        candidates = ", ".join(f"{float(value):g}" for value in row["folds"][0]["validation"])
        headings.append(f"{method}: {row['tuned']} among {candidates}")
    for name in scores.sets:
        cells = []
        for method in tuned:
            here = (r for r in scores.rows if (r["set"], r["method"]) == (name, method) and "tuned" in r)
            counts = Counter(fold["chosen"] for row in here for fold in row["folds"])
            cells.append(", ".join(f"{value:g} (×{count})" for value, count in sorted(counts.items())))
        lines.append([name, *cells])
    return table(["set", *headings], lines)
