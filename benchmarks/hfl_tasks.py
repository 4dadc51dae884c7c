# SPDX-License-Identifier: Apache-2.0
"""Four small regressions on which second fits, matrices, solves and samples can be compared with exact variances.

The tasks are like those of McInerney & Kallus (2024), whose own sizes, prior and choice of the noise are in
hfl_table1.py: a quadratic and a sine, with inputs that cover an interval, or leave a gap in its middle; 50 tanh units.
Settings of ours: N = 100 inputs in [-1, 1], the gap is |x| < 0.4, targets 2 x^2 - 1 and sin(4 x), known noise 0.1,
standard normal priors on all weights. Out of distribution is 1 < |x| <= 1.5, or the gap.

Each network is trained by Adam, which shows what Laplace without a minimum comes to; then ``polish`` finds the minimum
and every method puts its Gaussian around it. Errors are relative to the dense Hessian's variance.

    python benchmarks/hfl_tasks.py                       # three seeds, minutes
    python benchmarks/hfl_tasks.py --report              # the tables and the figure again
"""

import argparse
import json
import platform
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.hfl_tasks_report import Row, figure, tables
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
from pyro_dvi.laplace.methods.hessian_free import AbsoluteSum, InSample, LabelShift, Sum
from pyro_dvi.laplace.mode.convergence import Accept
from pyro_dvi.metrics import coverage, crps_gaussian

RESULTS = Path(__file__).parent / "results"
NOISE, NUM_DATA, HIDDEN, STEPS, RATE = 0.1, 100, 50, 20_000, 1e-2


@dataclass(frozen=True)
class Task:
    """A regression with inputs to learn from, and inputs to predict for."""

    name: str
    sine: bool
    gap: bool

    def mean(self, x: Tensor) -> Tensor:
        """The truth."""
        return (torch.sin(4 * x) if self.sine else 2 * x.square() - 1).squeeze(-1)

    def data(self, generator: torch.Generator, num: int = NUM_DATA) -> tuple[Tensor, Tensor]:
        """Training data ``[N, 1]`` and ``[N]``."""
        x = 2 * torch.rand(num, 1, generator=generator) - 1
        if self.gap:
            x = x.sign() * (0.4 + 0.6 * x.abs())
        return x, self.mean(x) + NOISE * torch.randn(num, generator=generator)

    def test_inputs(self, num: int = 100) -> tuple[Tensor, Tensor]:
        """Inputs ``[num, 1]`` in order, and whether each is in distribution."""
        x = torch.linspace(-1.0, 1.0, num) if self.gap else torch.linspace(-1.5, 1.5, num)
        inside = x.abs() >= 0.4 if self.gap else x.abs() <= 1
        return x.unsqueeze(-1), inside


TASKS = [
    Task("quadratic, uniform", False, False),
    Task("quadratic, in-between", False, True),
    Task("sine, uniform", True, False),
    Task("sine, in-between", True, True),
]

METHODS: dict[str, Method] = {
    "dense Hessian": Dense(Hessian()),
    "dense GGN": Dense(GGN()),
    "top 5 eigenvectors, GGN": TopEigen(5),
    "conjugate gradients, Hessian": ConjugateGradient(Hessian()),
    "64 posterior samples, GGN": PosteriorSamples(64),
    "HFL pointwise": HessianFree(),
    "HFL pointwise, one-sided": HessianFree(central=False),
    "HFL sum": HessianFree(Sum()),
    "HFL absolute sum": HessianFree(AbsoluteSum()),
    "HFL in-sample": HessianFree(InSample()),
    "HFL label shift": HessianFree(LabelShift()),
}


@dataclass(frozen=True)
class Training:
    """How a MAP is found: options of Adam, and of what it minimises."""

    steps: int = STEPS
    rate: float = RATE
    noise: float = NOISE
    prior_precision: float = 1.0


def trained(x: Tensor, y: Tensor, training: Training) -> nn.Module:
    """The MAP as a network; Adam in NumPy, since so small a network leaves torch little but overhead."""
    net = nn.Sequential(nn.Linear(1, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))
    parameters = list(net.parameters())
    w1, b1, w2, b2 = (p.detach().numpy() for p in parameters)  # views: the network moves with them
    inputs, targets = x.numpy(), y.numpy()
    first = [np.zeros_like(v) for v in (w1, b1, w2, b2)]
    second = [np.zeros_like(v) for v in (w1, b1, w2, b2)]
    for step in range(1, training.steps + 1):
        h = np.tanh(inputs @ w1.T + b1)
        residual = (h @ w2[0] + b2 - targets) / training.noise**2
        back = residual[:, None] * w2 * (1 - h * h)
        of_data = (back.T @ inputs, back.sum(0), (residual @ h)[None], residual.sum())
        for value, data, m, v in zip((w1, b1, w2, b2), of_data, first, second, strict=True):
            g = data + training.prior_precision * value
            m += 0.1 * (g - m)
            v += 0.001 * (g * g - v)
            value -= training.rate * m / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
    return net


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


def measured(guide: LaplaceGuide, batches: Any, method: Method, x: Tensor) -> tuple[Tensor, int, float]:
    """Variances of either sign at ``x``, the work in gradients of all data, and seconds."""
    energy = guide.energy(batches)
    begin = time.perf_counter()
    posterior = method.fit(energy.at(energy.start), seed=0)
    query = Query(energy.model, (x,), guide.unconstrained_mode(), energy.layout)
    read = posterior.responses if isinstance(method, HessianFree) else posterior.covariance  # type: ignore[attr-defined]
    variance = read(query)[:, 0, 0]
    return variance.double().detach(), energy.evaluations, time.perf_counter() - begin


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
    for unconverged in (None, Accept()):
        try:
            guide.fit(batches, HessianFree(), unconverged=unconverged)
            smallest = float(guide.predictive(x[::10]).variance.min())
            answers.append(f"no error; smallest variance {smallest:.3g}")
        except PyroDviError as error:
            answers.append(f"{type(error).__name__}: {error}".splitlines()[0])
    negative = int((torch.linalg.eigvalsh(hessian) < 0).sum())
    return {"negative_eigenvalues": negative, "by_default": answers[0], "when_accepted": answers[1]}


def rows_of(task: Task, seed: int, steps: int) -> Iterator[Row]:
    """Everything on one task with one seed."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    x, y = task.data(generator)
    batches = [(x, y)]
    test, inside = task.test_inputs()
    test_y = task.mean(test) + NOISE * torch.randn(len(test), generator=generator)
    common = {"task": task.name, "seed": seed}

    begin = time.perf_counter()
    guide = guide_of(trained(x, y, Training(steps)), x, y)
    seconds = time.perf_counter() - begin
    yield {
        **common,
        "kind": "training",
        "evaluations": steps,
        "seconds": seconds,
        **refusal(guide, batches, test),
    }
    begin = time.perf_counter()
    polished = guide.polish(batches, progress=False, max_gradients=50_000)
    seconds = time.perf_counter() - begin
    decrement = polished.newton_decrement
    yield {
        **common,
        "kind": "polish",
        "evaluations": polished.evaluations,
        "seconds": seconds,
        "decrement": decrement,
    }

    energy = guide.energy(batches)
    mode = Query(energy.model, (test,), guide.unconstrained_mode(), energy.layout)
    mean = mode.mean[:, 0]
    exact, against_ggn = (measured(guide, batches, Dense(c), test)[0] for c in (Hessian(), GGN()))

    def row(name: str, variance: Tensor, work: int, seconds: float, truth: Tensor) -> Row:
        error = (variance / truth - 1).abs()
        return {
            **common,
            "kind": "method",
            "method": name,
            "points": len(truth),
            "evaluations": work,
            "seconds": seconds,
            "error_median": float(error.median()),
            "error_max": float(error.max()),
            "negative": float((variance < 0).double().mean()),
        }

    for name, method in METHODS.items():
        variance, work, seconds = measured(guide, batches, method, test)
        found = row(name, variance, work, seconds, exact)
        found["error_median_ggn"] = float((variance / against_ggn - 1).abs().median())
        found.update(scores(mean, variance, test_y, inside))
        if seed == 0:
            found["band"] = variance.tolist()
        yield found
    if seed == 0:
        yield {
            **common,
            "kind": "picture",
            "x": test[:, 0].tolist(),
            "mean": mean.tolist(),
            "truth": task.mean(test).tolist(),
            "data_x": x[:, 0].tolist(),
            "data_y": y.tolist(),
        }
    single = in_float32(guide, x, y)
    try:
        variance, work, seconds = measured(single, [(x.float(), y.float())], HessianFree(), test[::4].float())
        yield row("HFL pointwise, float32", variance, work, seconds, exact[::4])
    except PyroDviError as error:
        yield {
            **common,
            "kind": "failure",
            "what": "HFL pointwise, float32",
            "error": f"{type(error).__name__}: {error}",
        }


def main() -> None:
    """Run, and write lines, tables and figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tasks", type=int, nargs="+", default=[0, 1, 2, 3], help="numbers of tasks")
    parser.add_argument("--steps", type=int, default=STEPS, help="of Adam before polishing")
    parser.add_argument("--report", action="store_true", help="only write the tables and the figure again")
    parser.add_argument("--out", type=Path, default=RESULTS / "hfl_tasks.jsonl")
    options = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore", DviWarning)  # of the pre-trained modes, whose numbers are the point here
    if not options.report:
        options.out.write_text("")
        for seed in options.seeds:
            for task in (TASKS[number] for number in options.tasks):
                for row in rows_of(task, seed, options.steps):
                    with options.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                    print({k: v for k, v in row.items() if not isinstance(v, list)}, flush=True)
    rows = [json.loads(line) for line in options.out.read_text().splitlines()]
    machine = f"{platform.machine()} CPU, {torch.get_num_threads()} thread, torch {torch.__version__}"
    text = tables(rows, machine)
    options.out.with_suffix(".md").write_text(text)
    figure(rows, options.out.with_suffix(".png"))
    print(text)


if __name__ == "__main__":
    main()
