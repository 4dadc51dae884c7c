# SPDX-License-Identifier: Apache-2.0
"""Table 1 of McInerney & Kallus (2024) under the paper's settings: Hessian-free Laplace against exact Laplace and MAP.

Settings of the paper: 50 tanh units; prior variance 3; 32 training inputs for the quadratic, 16 on each side of a gap,
160 for the sine; noise by a grid on the validation NLL of the MAP; learning rate .005 in training and fine-tuning. The
functions and intervals are those of four_regressions.py, with data of noise 0.1; also ours: 32 as the size of a
minibatch, 300 steps of fine-tuning, strength 1, as many validation as training data.

Fine-tuning starts at the network that Adam left, without a look at its Hessian; magnitudes of differences are taken.
"As printed" subtracts that network itself; "less an untilted fit" subtracts one that was trained on for as many steps
without a tilt. The exact Laplace approximation, pointwise second fits by Newton's
method, the Gauss-Newton matrix and its five largest eigenvalues are those of the minimum nearby, where ``polish`` has
brought the network. Scores are expectations over 100 draws of the noise.
"""

import warnings
from itertools import pairwise
from math import sqrt
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from benchmarks.laplace.four_regressions import NOISE, TASKS, Task, Training, measured, trained
from benchmarks.laplace.hessian_free.second_fits import AbsoluteSum, Mode, Pointwise, SecondFits, Sum
from benchmarks.laplace.hessian_free.solvers import Adam
from benchmarks.laplace.hessian_free.training_modes import InSample, LabelShift
from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings
from benchmarks.shared.figures import COLOURS
from benchmarks.shared.tables import provenance, table
from pyro_dvi.bayesian import regressor, to_bayesian_
from pyro_dvi.errors import DviWarning, PyroDviError
from pyro_dvi.laplace import GGN, Dense, Hessian, HessianFree, LaplaceGuide, Method, TopEigen
from pyro_dvi.predictive.metrics import coverage, crps_gaussian

PRIOR_VARIANCE, RATE, NOISES, BATCH, DRAWS = 3.0, 5e-3, (0.05, 0.07, 0.1, 0.15, 0.2, 0.3), 32, 100
STEPS, TUNING_STEPS = 5000, 300
DRAWN: dict[str, dict[str, Any]] = {
    "exact": {"color": "black"},
    "Newton, pointwise": {"color": COLOURS[0], "marker": "o", "linestyle": ""},
    "GGN": {"color": COLOURS[1], "linestyle": "--"},
    "as printed, pointwise": {"color": COLOURS[4], "marker": "^"},
    "less an untilted fit, pointwise": {"color": COLOURS[2], "marker": "s"},
    "less an untilted fit, in-sample": {"color": COLOURS[3], "marker": "v"},
}
AT_MINIMUM: dict[str, Method] = {
    "exact": Dense(Hessian()),
    "Newton, pointwise": HessianFree(),
    "GGN": Dense(GGN()),
    "top 5 eigenvectors, GGN": TopEigen(5),
}


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """Every task."""
    seeds = range(3 if budget == "small" else 10)
    return [{"task": task.name, "seed": seed} for seed in seeds for task in TASKS]


def num_data(task: Task) -> int:
    """Training inputs: half of them on each side, if there is a gap."""
    return 160 if task.sine else 32


def best_map(task: Task, generator: torch.Generator) -> tuple[nn.Module, float, Tensor, Tensor]:
    """The MAP of the noise with the best validation NLL, that noise, and the training data."""
    x, y = task.data(generator, num_data(task))
    validation_x, validation_y = task.data(generator, num_data(task))
    found = []
    for noise in NOISES:
        torch.manual_seed(int(generator.initial_seed()))  # the same start for each
        net = trained(x, y, Training(STEPS, RATE, noise, 1 / PRIOR_VARIANCE))
        with torch.no_grad():
            likelihood = torch.distributions.Normal(net(validation_x)[:, 0], noise)
        found.append((float(-likelihood.log_prob(validation_y).mean()), noise, net))
    _, noise, net = min(found, key=lambda item: item[0])
    return net, noise, x, y


def scores(mean: Tensor, variance: Tensor, y: Tensor, rows: Tensor) -> tuple[float, float, float]:
    """PICP of the 95 % interval, CRPS and NLL of some inputs; y is ``[draws, inputs]``, the variance with noise."""
    m, s, t = (v[..., rows].expand(len(y), -1).flatten() for v in (mean, variance.sqrt(), y))
    nll = float(-torch.distributions.Normal(m, s).log_prob(t).mean())
    return coverage(m - 1.96 * s, m + 1.96 * s, t), crps_gaussian(m, s, t), nll


def run(settings: Settings, data_dir: str | None) -> Row:
    """All methods."""
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore", DviWarning)  # of the pre-trained modes, whose numbers are the point here
    task = next(task for task in TASKS if task.name == settings["task"])
    generator = torch.Generator().manual_seed(settings["seed"])
    net, noise, x, y = best_map(task, generator)
    test, inside = task.test_inputs(16)
    test_y = task.mean(test) + NOISE * torch.randn(DRAWS, len(test), generator=generator)
    whole, minibatches = [(x, y)], list(zip(x.split(BATCH), y.split(BATCH), strict=True))
    guide = LaplaceGuide(regressor(to_bayesian_(net, sqrt(PRIOR_VARIANCE)), len(x), noise_scale=noise))
    guide.initialize(x, y)

    def row(variance: Tensor, work: int, mean: Tensor) -> Row:
        found: Row = {"variance": variance.tolist(), "work": work}
        for where, rows in (("in", inside), ("out", ~inside)):
            found[where] = scores(mean, variance.abs() + noise**2, test_y, rows)
        return found

    def at_mode() -> Tensor:
        return guide.query(test).mean[:, 0]

    left = at_mode()
    methods = {"MAP": row(torch.zeros(len(test)), 0, left)}
    fine_tuning = Adam(1.0, RATE, TUNING_STEPS // len(minibatches))
    modes: dict[str, Mode] = {"pointwise": Pointwise(), "sum over the test inputs": Sum(test)}
    modes |= {"absolute sum over the test inputs": AbsoluteSum(test)}
    modes |= {"in-sample": InSample(), "label shift": LabelShift()}
    fine_tuned: dict[str, Method] = {}
    for name, mode in modes.items():
        fine_tuned[f"as printed, {name}"] = SecondFits(mode, fine_tuning, less="mode")
        fine_tuned[f"less an untilted fit, {name}"] = SecondFits(mode, fine_tuning, less="untilted")
    for name, method in fine_tuned.items():
        variance, work, _ = measured(guide, minibatches, method, test)
        methods[name] = row(variance, work, left)
    found: Row = {"noise": noise, "num_data": len(x), "methods": methods}
    try:
        guide.polish(whole, progress=False, max_gradients=50_000)
        methods["MAP at the minimum"] = row(torch.zeros(len(test)), 0, at_mode())
        for name, method in AT_MINIMUM.items():
            variance, work, _ = measured(guide, whole, method, test)
            methods[name] = row(variance, work, at_mode())
    except PyroDviError as error:
        found["failure"] = f"{type(error).__name__}: {error}"
    return found


def report(rows: list[Row], folder: Path) -> str:
    """A table for each task."""
    parts = [
        f"{provenance('hfl_table1', rows)} {TUNING_STEPS} steps of fine-tuning, float64. Scores are means over seeds, "
        "in distribution / out of distribution.",
        "*As printed*: the difference from the network that fine-tuning started from. *Less an untilted fit*: the "
        "difference from a network trained for as many further steps without a tilt. "
        "Both use the mean of the MAP network. From the row *MAP at the minimum* on, the network is polished.",
        "*Ratio*: standard deviation divided by the exact one, at the 10th, 50th and 90th percentile over inputs. *Log "
        "error*: median absolute logarithm of the ratio of variances. *Rank*: Spearman's rank correlation with the "
        "exact standard deviations over inputs, averaged over seeds. *Negative*: fraction of inputs at which the "
        "difference of fits is negative, as no variance can be. *Work*: full-data gradients.",
    ]
    for task in dict.fromkeys(row["task"] for row in rows):
        own = [row for row in rows if row["task"] == task]
        noises = ", ".join(f"{row['noise']:g}" for row in own)
        parts.append(f"**{task}**, N = {own[0]['num_data']}, chosen noise scales {noises}")
        parts.append(_table([row["methods"] for row in own if "failure" not in row]))
        for row in own:
            if "failure" in row:
                why = " ".join(row["failure"].splitlines()[:2])
                parts.append(f"Seed {row['seed']} is left out, because it has no exact result. {why}")
    first = min(row["seed"] for row in rows if "failure" not in row)
    _draw([row for row in rows if row["seed"] == first and "failure" not in row], folder / "hfl_table1.png")
    parts += [
        f"![Standard deviation of the function at each input, seed {first}; for negative differences, the square root "
        "of the magnitude. Grey: out of distribution](hfl_table1.png)",
    ]
    return "\n\n".join(part.rstrip() for part in parts)


def _draw(rows: list[Row], path: Path) -> None:
    """Standard deviations by input, a panel for each task."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(-(-len(rows) // 2), 2, figsize=(9, 6.4), layout="constrained", squeeze=False)
    for axis, row in zip(axes.flat, rows, strict=False):
        x, inside = next(task for task in TASKS if task.name == row["task"]).test_inputs(16)
        for start, stop in [(a, b) for a, b in pairwise(x[:, 0].tolist())]:
            if not bool(inside[(x[:, 0] >= start) & (x[:, 0] <= stop)].all()):
                axis.axvspan(start, stop, color="0.92", linewidth=0)
        for method, style in DRAWN.items():
            deviation = torch.tensor(row["methods"][method]["variance"]).abs().sqrt()
            axis.plot(x[:, 0], deviation, label=method, markersize=4, **style)
        axis.set(title=row["task"], xlabel="input", yscale="log")
    for axis in axes[:, 0]:
        axis.set_ylabel("standard deviation of the function")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _table(rows: list[dict[str, Row]]) -> str:
    lines = []
    exact = [torch.tensor(methods["exact"]["variance"]) for methods in rows]
    for method in rows[0]:
        found = [methods[method] for methods in rows]
        cells = [
            f"{mean(row['in'][k] for row in found):.3f} / {mean(row['out'][k] for row in found):.3f}"
            for k in range(3)
        ]
        if method.startswith("MAP"):
            cells += [""] * 4
        else:
            pairs = [(torch.tensor(row["variance"]), truth) for row, truth in zip(found, exact, strict=True)]
            ratios = torch.cat([(ours.abs() / theirs).sqrt() for ours, theirs in pairs])
            low, middle, high = torch.quantile(ratios, torch.tensor([0.1, 0.5, 0.9], dtype=ratios.dtype))
            rank = mean(float(spearmanr(ours.abs(), theirs).statistic) for ours, theirs in pairs)
            negative = mean(float((ours < 0).double().mean()) for ours, _ in pairs)
            error = 2 * ratios.log().abs().median()
            cells += [
                f"{low:.3f} / {middle:.3f} / {high:.3f}",
                f"{error:.3f}",
                f"{rank:.3f}",
                f"{negative:.0%}",
            ]
        lines.append([method, *cells, f"{mean(row['work'] for row in found):.0f}"])
    return table(["method", "PICP", "CRPS", "NLL", "ratio", "log error", "rank", "negative", "work"], lines)


BENCHMARK = Benchmark(
    "hfl_table1",
    "Can Table 1 of the Hessian-free paper be reproduced, which compares second fits with exact Laplace?",
    plan,
    run,
    report,
)
