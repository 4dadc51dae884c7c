# SPDX-License-Identifier: Apache-2.0
"""From a trained network to its Laplace approximation with default arguments: how often it ends well, at which cost.

Each problem is trained to its mode as networks are (3,000 full-batch steps of Adam, a rate of .01 that falls to a
tenth), then ``guide.polish(batches)`` and ``guide.fit(batches, ...)`` run with their defaults: with the Hessian where
the activations are smooth, with the Gauss-Newton matrix where they have kinks. It ends well where neither raises an
error, and the covariance is positive definite. Work is counted in gradients of all data; time is that of the processor,
relative to the training in the same process.
"""

import re
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pyro.distributions as dist
import torch
from sklearn import datasets
from torch import Tensor, nn

import pyro_dvi as dvi
from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings
from benchmarks.shared.regressions import load
from benchmarks.shared.tables import provenance, table
from pyro_dvi.bayesian import init_to_module
from pyro_dvi.laplace import ConjugateGradient, Dense, Hessian

STEPS, RATE = 3000, 1e-2
DENSE = 700  # latents up to which the Hessian is built
SMOOTH: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "softplus": nn.Softplus,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
}
KINKED: dict[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "leaky": nn.LeakyReLU}


@dataclass(frozen=True)
class Problem:
    """A network, its data and its prior."""

    data: str
    activation: str
    widths: tuple[int, ...] = (20,)
    dtype: torch.dtype = torch.float64
    prior_scale: float = 1.0
    kind: str = "mlp"
    noise: float | None = 0.3  # None: a latent one
    subset: str | None = None
    batches: int = 1

    @property
    def smooth(self) -> bool:
        """Whether U has derivatives of every order."""
        return self.activation in SMOOTH

    def __str__(self) -> str:
        parts = [
            self.data,
            self.kind if self.kind != "mlp" else "-".join(map(str, self.widths)),
            self.activation,
        ]
        parts += [str(self.dtype).removeprefix("torch."), f"prior {self.prior_scale:g}"]
        parts += ["latent noise"] if self.noise is None else []
        parts += [f"only {self.subset}"] if self.subset else []
        parts += [f"{self.batches} batches"] if self.batches > 1 else []
        return ", ".join(parts)


def battery() -> list[Problem]:
    """Return the problems."""
    f32 = torch.float32
    found = [
        Problem("cosine", "tanh", prior_scale=3**0.5, noise=0.1),
        Problem("cosine", "tanh", prior_scale=3**0.5, noise=0.1, dtype=f32),
        Problem("gap", "tanh", (50,), prior_scale=1.0, noise=0.1),
        Problem("gap", "softplus", (50,), noise=0.1),
        Problem("gap", "gelu", (10, 10), noise=0.1),
        Problem("gap", "silu", (10, 10, 10), noise=0.1),
        Problem("gap", "tanh", (10, 10), noise=None),
        Problem("gap", "tanh", (10, 10), noise=None, dtype=f32),
        Problem("gap", "gelu", (50,), noise=0.1, dtype=f32),
        Problem("diabetes", "tanh", noise=0.7),
        Problem("diabetes", "gelu", (20, 20), noise=0.7),
        Problem("diabetes", "softplus", (20,), noise=None),
        Problem("diabetes", "tanh", prior_scale=0.1, noise=0.7),
        Problem("diabetes", "tanh", prior_scale=10.0, noise=0.7),
        Problem("diabetes", "tanh", noise=0.7, dtype=f32),
        Problem("diabetes", "gelu", (20, 20), noise=0.7, dtype=f32, batches=4),
        Problem("wine", "tanh"),
        Problem("wine", "tanh", prior_scale=10.0),
        Problem("wine", "gelu", (20, 20)),
        Problem("wine", "softplus", prior_scale=0.3),
        Problem("wine", "tanh", dtype=f32),
        Problem("wine", "gelu", (20, 20), dtype=f32, prior_scale=3.0),
        Problem("breast cancer", "tanh"),
        Problem("breast cancer", "silu", (20, 20, 20)),
        Problem("breast cancer", "tanh", prior_scale=10.0),
        Problem("breast cancer", "gelu", kind="batch norm"),
        Problem("breast cancer", "tanh", dtype=f32),
        Problem("breast cancer", "gelu", kind="batch norm", dtype=f32),
        Problem("digits", "tanh", (20,)),
        Problem("digits", "gelu", (50,), batches=4),
        Problem("digits", "tanh", (50,), subset="net.2.*"),
        Problem("digits", "tanh", (50,), subset="net.2.*", dtype=f32),
        Problem("digits", "gelu", kind="cnn"),
        Problem("digits", "gelu", kind="cnn", dtype=f32),
        Problem("digits", "tanh", (50,), dtype=f32, batches=4),
        Problem("gap", "relu", (50,), noise=0.1),
        Problem("gap", "relu", (10, 10), noise=0.1, dtype=f32),
        Problem("diabetes", "relu", (20, 20), noise=0.7),
        Problem("wine", "relu", (20,), prior_scale=10.0),
        Problem("breast cancer", "relu", (20, 20), dtype=f32),
        Problem("breast cancer", "leaky", (20, 20)),
        Problem("breast cancer", "relu", kind="batch norm"),
        Problem("digits", "relu", (50,), dtype=f32),
        Problem("digits", "relu", kind="max-pool cnn"),
        Problem("digits", "relu", kind="max-pool cnn", dtype=f32),
    ]
    for name, activation in (
        ("yacht", "tanh"),
        ("boston", "gelu"),
        ("energy", "softplus"),
        ("concrete", "tanh"),
    ):
        found += [Problem(name, activation, (50,)), Problem(name, activation, (50,), dtype=f32)]
    found += [Problem("boston", "relu", (50,)), Problem("yacht", "relu", (50,), dtype=f32)]
    return found


def data_of(problem: Problem, data_dir: str | None) -> tuple[Tensor, Tensor]:
    """Return inputs and targets; targets of regressions are standardised but for the curves."""
    name, generator = problem.data, torch.Generator().manual_seed(0)
    if name in ("cosine", "gap"):
        x = torch.linspace(-1, 1, 60, dtype=torch.float64)
        if name == "gap":
            x = torch.cat([x[:30] * 0.6 - 0.4, x[30:] * 0.6 + 0.4])
        noise = torch.randn(60, generator=generator, dtype=torch.float64)
        y = (3 * x).cos() + 0.1 * noise if name == "cosine" else (4 * x).sin() + 0.1 * noise
        return x.unsqueeze(-1).to(problem.dtype), y.to(problem.dtype)
    bunches = {
        "wine": datasets.load_wine,
        "breast cancer": datasets.load_breast_cancer,
        "digits": datasets.load_digits,
    }
    if name in bunches:
        rows = bunches[name]()
        rows_x, y = torch.as_tensor(rows.data), torch.as_tensor(rows.target)
        order = torch.randperm(len(y), generator=generator)[:600]
        x = rows_x[order].double()
        x = x / 16 if name == "digits" else (x - x.mean(0)) / x.std(0)
        return x.to(problem.dtype), y[order]
    if name == "diabetes":
        rows = datasets.load_diabetes()
        x, y = torch.as_tensor(rows.data), torch.as_tensor(rows.target)
    else:
        x, y = load(name, data_dir)
        order = torch.randperm(len(y), generator=generator)[:400]
        x, y = x[order], y[order]
    x, y = (x - x.mean(0)) / x.std(0).clamp(min=1e-9), (y - y.mean()) / y.std()
    return x.to(problem.dtype), y.to(problem.dtype)


def network(problem: Problem, inputs: int, outputs: int) -> nn.Sequential:
    """Return an untrained network."""
    act = {**SMOOTH, **KINKED}[problem.activation]
    if problem.kind in ("cnn", "max-pool cnn"):
        pool = nn.MaxPool2d(2) if problem.kind == "max-pool cnn" else nn.AvgPool2d(2)
        layers = [nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), act(), pool]
        return nn.Sequential(
            *layers, nn.Conv2d(6, 8, 3, stride=2, padding=1), act(), nn.Flatten(), nn.Linear(32, outputs)
        )
    layers: list[nn.Module] = []
    for width in problem.widths:
        norm = [nn.BatchNorm1d(width)] if problem.kind == "batch norm" else []
        layers += [nn.Linear(inputs, width), *norm, act()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


def trained(problem: Problem, x: Tensor, y: Tensor) -> tuple[Any, dvi.LaplaceGuide, float]:
    """Return a model at its mode, its guide, and the seconds of its training."""
    classes = 0 if y.is_floating_point() else int(y.max()) + 1
    net = network(problem, x.shape[1], classes or 1).to(problem.dtype)
    latent = problem.noise is None
    log_noise = torch.zeros((), dtype=problem.dtype, requires_grad=latent)
    parameters = [*net.parameters(), *([log_noise] if latent else [])]
    adam = torch.optim.Adam(parameters, lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, STEPS, eta_min=RATE / 10)
    start = time.process_time()
    for _ in range(STEPS):
        adam.zero_grad()
        output = net(x)
        if classes:
            loss = nn.functional.cross_entropy(output, y, reduction="sum")
        else:
            scale = log_noise.exp() if latent else problem.noise
            loss = -dist.Normal(output.squeeze(-1), scale).log_prob(y).sum()
            if latent:
                loss = loss + 0.5 * scale.square() - log_noise
        (loss + sum(p.square().sum() for p in net.parameters()) / (2 * problem.prior_scale**2)).backward()
        adam.step()
        schedule.step()
    seconds = time.process_time() - start
    net.eval()
    dvi.to_bayesian_(net, prior_scale=problem.prior_scale)
    if classes:
        return *_guided(dvi.classifier(net, len(y)), {}), seconds
    noise = dist.HalfNormal(torch.ones((), dtype=problem.dtype)) if latent else problem.noise
    known = {"noise_scale": log_noise.detach().exp()} if latent else {}
    return *_guided(dvi.regressor(net, len(y), noise), known), seconds


def _guided(model: Any, known: dict[str, Tensor]) -> tuple[Any, dvi.LaplaceGuide]:
    if not known:
        return model, dvi.LaplaceGuide(model)

    def init(site: Any) -> Tensor:
        return known[site["name"]] if site["name"] in known else init_to_module(site)

    return model, dvi.LaplaceGuide(model, init_loc_fn=init)


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """Every problem once."""
    return [{"problem": str(problem)} for problem in battery()]


def run(settings: Settings, data_dir: str | None) -> Row:
    """Train, polish, fit and predict."""
    problem = next(problem for problem in battery() if str(problem) == settings["problem"])
    x, y = data_of(problem, data_dir)
    _model, guide, training = trained(problem, x, y)
    batches = list(zip(x.chunk(problem.batches), y.chunk(problem.batches), strict=True))
    options = {} if problem.subset is None else {"subset": problem.subset}
    size = len(guide.energy(batches, **options).start)
    start = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            work = guide.polish(batches, progress=False, **options).gradients
            method = Dense()
            if problem.smooth:
                method = Dense(Hessian()) if size <= DENSE else ConjugateGradient(Hessian())
            guide.fit(batches, method, **options)
            spent = time.process_time() - start
            variance = guide.predictive(x[:5]).variance
            positive = bool((variance > 0).all() & variance.isfinite().all())
            ended = "well" if positive else "a variance that is not positive"
        except dvi.errors.PyroDviError as error:
            spent = time.process_time() - start
            work = getattr(getattr(error, "report", None), "evaluations", 0)
            ended = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    said = [str(w.message).splitlines()[0] for w in caught if issubclass(w.category, dvi.errors.DviWarning)]
    kind = "float64" if problem.dtype == torch.float64 else "float32"
    return {
        "group": f"smooth, {kind}, Hessian()" if problem.smooth else "with kinks, GGN()",
        "size": size,
        "work": work,
        "time": spent / training,
        "ended": ended,
        "warned": "; ".join(said),
    }


def report(rows: list[Row], folder: Path) -> str:
    """How many end well in each group, and a line for each problem."""
    summary = []
    for group in dict.fromkeys(row["group"] for row in rows):
        found = [row for row in rows if row["group"] == group]
        work, times = [row["work"] for row in found], [row["time"] for row in found]
        well = f"{sum(row['ended'] == 'well' for row in found)} of {len(found)}"
        largest = [f"{max(work):,}", f"{median(times):.2f}", f"{max(times):.2f}"]
        summary.append([group, well, f"{median(work):,.0f}", *largest])
    each = [
        [
            row["problem"],
            f"{row['size']:,}",
            f"{row['work']:,}",
            f"{row['time']:.2f}",
            row["ended"],
            _in_short(row["warned"]),
        ]
        for row in rows
    ]
    return (
        f"# From a trained network to its Laplace approximation\n\nEach network is trained for {STEPS} steps of Adam; "
        "then `polish` and `fit` run with default arguments. Work is the number of full-data gradients of `polish`; "
        "time is the time of `polish` and `fit`, relative to training; sd means posterior standard deviations. "
        f"{provenance('laplace_modes', rows)}\n\n"
        + table(["problems", "succeeded", "median work", "largest", "median time", "largest"], summary)
        + "\n"
        + table(["problem", "D", "work", "time", "outcome", "warnings"], each)
    )


def _in_short(warned: str) -> str:
    """Return why polish ended, and how far the minimum is, of what was said in the warnings."""
    reasons = re.findall(r"polish: ([^;]*);", warned)
    distances = re.findall(r"the minimum is (\S+) posterior", warned)
    return "; ".join([*reasons, *(f"the minimum is {distance} sd away" for distance in distances)])


BENCHMARK = Benchmark(
    "laplace_modes",
    "How often do polish and fit succeed with default arguments, and at what cost?",
    plan,
    run,
    report,
)
