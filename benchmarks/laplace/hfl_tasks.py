# SPDX-License-Identifier: Apache-2.0
"""Four small regressions on which second fits, matrices, solves and samples can be compared with exact variances.

The paper's own sizes, prior and choice of the noise are in hfl_table1.py. Settings of ours: N = 100 inputs, known noise
0.1, standard normal priors on all weights. Each network is trained by Adam, which shows what Laplace without a minimum
comes to; then ``polish`` finds the minimum and every method puts its Gaussian around it. Errors are relative to the
dense Hessian's variance.
"""

import time
import warnings
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.laplace.four_regressions import HIDDEN, NOISE, TASKS, Training, measured, trained
from benchmarks.laplace.hessian_free.second_fits import AbsoluteSum, SecondFits, Sum
from benchmarks.laplace.hessian_free.training_modes import InSample, LabelShift
from benchmarks.laplace.hfl_tasks_report import report
from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings
from pyro_dvi.bayesian import regressor, to_bayesian_
from pyro_dvi.errors import DviWarning, PyroDviError
from pyro_dvi.laplace import (
    GGN,
    ConjugateGradient,
    Dense,
    Hessian,
    HessianFree,
    LaplaceGuide,
    Method,
    PosteriorSamples,
    TopEigen,
)
from pyro_dvi.laplace.energy.query import Query
from pyro_dvi.predictive.metrics import coverage, crps_gaussian

NUM_DATA, TRAINING = 100, Training(steps=20_000, rate=1e-2)

METHODS: dict[str, Method] = {
    "dense Hessian": Dense(Hessian()),
    "dense GGN": Dense(GGN()),
    "top 5 eigenvectors, GGN": TopEigen(5),
    "conjugate gradients, Hessian": ConjugateGradient(Hessian()),
    "64 posterior samples, GGN": PosteriorSamples(64),
    "HFL pointwise": HessianFree(),
    "HFL pointwise, one-sided": SecondFits(less="untilted"),
    "HFL sum": SecondFits(Sum()),
    "HFL absolute sum": SecondFits(AbsoluteSum()),
    "HFL in-sample": SecondFits(InSample()),
    "HFL label shift": SecondFits(LabelShift()),
}


def guide_of(net: nn.Module, x: Tensor, y: Tensor) -> LaplaceGuide:
    """A guide whose mode is the network."""
    guide = LaplaceGuide(regressor(to_bayesian_(net), NUM_DATA, noise_scale=NOISE))
    guide.initialize(x, y)
    return guide


def in_float32(guide: LaplaceGuide, x: Tensor, y: Tensor) -> LaplaceGuide:
    """The same mode in single precision."""
    net = nn.Sequential(nn.Linear(1, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)).float()
    single = guide_of(net, x.float(), y.float())
    with torch.no_grad():
        for name, loc in guide.unconstrained_mode().items():
            attrgetter(name)(single.locs).copy_(loc)
    return single


def scores(mean: Tensor, variance: Tensor, y: Tensor, inside: Tensor) -> dict[str, float]:
    """PICP of the 95 % interval, CRPS and NLL where the variance is not negative."""
    found = {}
    for where, rows in (("in", inside), ("ood", ~inside)):
        rows = rows & (variance >= 0)
        if not bool(rows.any()):
            continue
        m, s, t = mean[rows], (variance[rows] + NOISE**2).sqrt(), y[rows]
        found[f"picp_{where}"] = coverage(m - 1.96 * s, m + 1.96 * s, t)
        found[f"crps_{where}"] = crps_gaussian(m, s, t)
        found[f"nll_{where}"] = float(-torch.distributions.Normal(m, s).log_prob(t).mean())
    return found


def refusal(guide: LaplaceGuide, batches: Any, x: Tensor) -> Row:
    """What fits say of the mode that Adam left."""
    energy = guide.energy(batches)
    hessian = energy.at(energy.start).hessian(torch.eye(len(energy.start)))
    answers = []
    for unconverged in ("refuse", "accept"):
        try:
            guide.fit(batches, HessianFree(), unconverged=unconverged)
            smallest = float(guide.predictive(x[::10]).variance.min())
            answers.append(f"no error; smallest variance {smallest:.3g}")
        except PyroDviError as error:
            answers.append(f"{type(error).__name__}: {error}".splitlines()[0])
    negative = int((torch.linalg.eigvalsh(hessian) < 0).sum())
    return {"negative_eigenvalues": negative, "by_default": answers[0], "when_accepted": answers[1]}


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """Every task."""
    seeds = range(3 if budget == "small" else 10)
    return [{"task": task.name, "seed": seed} for seed in seeds for task in TASKS]


def run(settings: Settings, data_dir: str | None) -> Row:
    """Train, polish, and measure every method."""
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore", DviWarning)  # of the pre-trained modes, whose numbers are the point here
    task = next(task for task in TASKS if task.name == settings["task"])
    generator = torch.Generator().manual_seed(settings["seed"])
    x, y = task.data(generator, NUM_DATA)
    batches = [(x, y)]
    test, inside = task.test_inputs()
    test_y = task.mean(test) + NOISE * torch.randn(len(test), generator=generator)

    begin = time.perf_counter()
    guide = guide_of(trained(x, y, TRAINING), x, y)
    training = {"evaluations": TRAINING.steps, "seconds": time.perf_counter() - begin}
    found: Row = {"training": {**training, **refusal(guide, batches, test)}, "methods": {}}
    begin = time.perf_counter()
    polished = guide.polish(batches, progress=False, max_gradients=50_000)
    found["polish"] = {
        "evaluations": polished.gradients,
        "seconds": time.perf_counter() - begin,
        "decrement": polished.newton_decrement,
    }
    energy = guide.energy(batches)
    mode = Query(energy.model, (test,), guide.unconstrained_mode(), energy.layout)
    mean = mode.mean[:, 0]
    exact, against_ggn = (measured(guide, batches, Dense(c), test)[0] for c in (Hessian(), GGN()))
    for name, method in METHODS.items():
        measurement = measured(guide, batches, method, test)
        variance = measurement[0]
        found["methods"][name] = {
            **errors(*measurement, exact),
            "error_median_ggn": float((variance / against_ggn - 1).abs().median()),
            **scores(mean, variance, test_y, inside),
            **({"band": variance.tolist()} if settings["seed"] == 0 else {}),
        }
    if settings["seed"] == 0:
        curves = {"x": test[:, 0], "mean": mean, "truth": task.mean(test), "data_x": x[:, 0], "data_y": y}
        found["picture"] = {name: values.tolist() for name, values in curves.items()}
    single = in_float32(guide, x, y)
    try:
        measurement = measured(single, [(x.float(), y.float())], HessianFree(), test[::4].float())
        found["methods"]["HFL pointwise, float32"] = errors(*measurement, exact[::4])
    except PyroDviError as error:
        found["failure"] = f"{type(error).__name__}: {error}"
    return found


def errors(variance: Tensor, work: int, seconds: float, truth: Tensor) -> Row:
    """How far variances are from the truth, and what they took."""
    error = (variance / truth - 1).abs()
    return {
        "points": len(truth),
        "evaluations": work,
        "seconds": seconds,
        "error_median": float(error.median()),
        "error_max": float(error.max()),
        "negative": float((variance < 0).double().mean()),
    }


BENCHMARK = Benchmark(
    "hfl_tasks",
    "How close are second fits, solvers and samples to the exact Laplace variance, on four regressions?",
    plan,
    run,
    report,
)
