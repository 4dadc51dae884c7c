# SPDX-License-Identifier: Apache-2.0
"""How wide is each posterior where there are no data? Beside Hamiltonian Monte Carlo, on one regression with a gap.

Points of sin 2x on both sides of a gap, noise 0.1, one layer of softplus units under N(0, 2²) priors, float64. The
network is so small that many chains of Hamiltonian Monte Carlo can run as one batch. All methods approximate the same
posterior: the KL weight is 1, the noise is known, and every step takes all points.
"""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import pyro
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoDelta, AutoNormal
from pyro.ops.stats import split_gelman_rubin
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import pyro_dvi as dvi
from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings
from benchmarks.shared.tables import mean_sd, provenance, table
from pyro_dvi.laplace import Dense

NUM_DATA, NOISE, HIDDEN, PRIOR_SCALE = 60, 0.1, 10, 2.0
START, END = 1.0, 2.0  # data lie at START < |x| < END
STEPS, NUM_DRAWS = 2000, 200
CHAINS, WARMUP, CHAIN, LEAPS = 16, 300, 500, (100, 300)
REFERENCE = "Hamiltonian Monte Carlo"
Trained = tuple[Any, Any]


def training_data() -> tuple[Tensor, Tensor]:
    """Return points on both sides of the gap."""
    place = 2 * torch.rand(NUM_DATA) - 1
    x = place.sign() * START + place * (END - START)
    return x[:, None], torch.sin(2 * x) + NOISE * torch.randn(NUM_DATA)


def places() -> dict[str, Tensor]:
    """Return inputs in the middle half of the gap, and among the data."""
    right = torch.linspace(START, END, 50)[:, None]
    return {"gap": torch.linspace(-START / 2, START / 2, 50)[:, None], "data": torch.cat([-right, right])}


def build() -> Any:
    """Return an untrained model."""
    net = nn.Sequential(nn.Linear(1, HIDDEN), nn.Softplus(), nn.Linear(HIDDEN, 1))
    return dvi.regressor(dvi.to_bayesian_(net, prior_scale=PRIOR_SCALE), NUM_DATA, noise_scale=NOISE)


def trained(guide: Callable[[Any], Any], elbo: Any, batch: Any, optimizer: Any = None) -> Trained:
    """Train an untrained model with a guide."""
    model = build()
    posterior = guide(model)
    if optimizer is None:
        optimizer = dvi.optim.Adam(
            dvi.optim.learning_rates(0.02), scheduler=partial(CosineAnnealingLR, T_max=STEPS)
        )
    dvi.fit(SVI(model, posterior, optimizer, loss=elbo), [batch], STEPS, progress=False)
    return model, posterior


def point(batch: Any) -> Trained:
    """Return maximum a posteriori."""
    return trained(partial(AutoDelta, init_loc_fn=dvi.bayesian.init_to_module), dvi.SampledELBO(), batch)


def laplace(batch: Any, subset: str | None = None) -> Trained:
    """Return a Gaussian around a minimum, of all weights or of some."""
    model, guide = trained(dvi.LaplaceGuide, dvi.TaylorELBO(), batch)
    guide.polish([batch], progress=False)
    guide.fit([batch], Dense(), subset=subset)
    return model, guide


def by_samples(guide: Any, batch: Any) -> Trained:
    """Train a guide of Pyro's with draws, of small width at the start."""
    start = partial(guide, init_loc_fn=dvi.bayesian.init_to_module, init_scale=0.01)
    return trained(start, dvi.SampledELBO(), batch)


def natural(optimizer: Any, batch: Any) -> Trained:
    """Train with natural gradients, by the default options."""
    return trained(dvi.NaturalGradientGuide, dvi.NaturalGradientELBO(), batch, optimizer({}))


DRAWS = dvi.Samples(NUM_DRAWS)
METHODS: dict[str, tuple[Callable[[Any], Trained], Any]] = {
    "Laplace, all weights": (laplace, dvi.Linearised()),
    "Laplace, last layer": (partial(laplace, subset="net.2.*"), dvi.Linearised()),
    "ensemble of 5 MAP": (
        lambda batch: dvi.train_ensemble(partial(point, batch), 5, seed=torch.initial_seed(), progress=False),
        dvi.AtMean(),
    ),
    "sampled VI, mean-field": (partial(by_samples, AutoNormal), DRAWS),
    "VOGN": (partial(natural, dvi.VOGN), DRAWS),
    "MNVI": (partial(trained, dvi.MultiplicativeNoiseGuide, dvi.MomentPropagationELBO()), dvi.Moments()),
    "mean-field moments": (partial(trained, dvi.MeanFieldGuide, dvi.MomentPropagationELBO()), dvi.Moments()),
    "VL, by draws": (partial(trained, dvi.MeanFieldGuide, dvi.TaylorELBO()), DRAWS),
}


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """Every method, and the reference, on the data of every seed."""
    seeds = range(3 if budget == "small" else 10)
    return [{"method": method, "seed": seed} for seed in seeds for method in (REFERENCE, *METHODS)]


def run(settings: Settings, data_dir: str | None) -> Row:
    """Return the standard deviation of the function in the gap and among the data, and the error of its mean there."""
    torch.set_default_dtype(torch.float64)
    batch = training_data()  # the first numbers that the seed draws, so that all methods have the same
    if settings["method"] == REFERENCE:
        return chains(batch)
    train, rule = METHODS[settings["method"]]
    model, guide = train(batch)
    found: Row = {}
    for name, x in places().items():
        prediction = dvi.predict(model, guide, x, rule, seed=0)
        # The mean over inputs of the variance of f, whose noise is known.
        found |= summary(name, prediction.mean.reshape(-1), prediction.variance.reshape(-1) - NOISE**2)
    pyro.clear_param_store()
    return found


def chains(batch: tuple[Tensor, Tensor]) -> Row:
    """Return the same for Hamiltonian Monte Carlo, and how well its chains agree.

    Each chain starts at a minimum of its own, from a draw of the prior. Steps are adapted by chain in the warm-up.
    """
    u = torch.randn(CHAINS, 3 * HIDDEN + 1).requires_grad_()
    adam = torch.optim.Adam([u], 0.03)
    for _ in range(1000):
        adam.zero_grad()
        energy(u, batch).sum().backward()
        adam.step()
    u, now, slope = energy_and_slope(u, batch)
    step, draws = torch.full((CHAINS, 1), 1e-3), []
    for iteration in range(WARMUP + CHAIN):
        momentum = torch.randn_like(u)
        before = now + 0.5 * momentum.square().sum(-1)
        place, value, pull = u, now, slope
        for _ in range(int(torch.randint(*LEAPS, ()))):
            momentum = momentum - 0.5 * step * pull
            place, value, pull = energy_and_slope(place + step * momentum, batch)
            momentum = momentum - 0.5 * step * pull
        accepted = (before - value - 0.5 * momentum.square().sum(-1)).clamp(max=0).exp().nan_to_num(0.0)
        moved = (torch.rand(CHAINS) < accepted).unsqueeze(-1)
        u, slope = torch.where(moved, place, u), torch.where(moved, pull, slope)
        now = torch.where(moved.squeeze(-1), value, now)
        if iteration < WARMUP:
            step = step * (0.1 * (accepted - 0.8)).exp().unsqueeze(-1)
        else:
            draws.append(u)
    found: Row = {}
    for name, x in places().items():
        f = torch.stack([functions(one, x) for one in draws], 1)  # [chains, draws, inputs]
        found |= summary(name, f.flatten(0, 1).mean(0), f.flatten(0, 1).var(0))
        found[f"r_hat_{name}"] = float(split_gelman_rubin(f, 0, 1).max())
    return found


def functions(u: Tensor, x: Tensor) -> Tensor:
    """Return the outputs of the network, ``[chains, inputs]``, for weights in units of their prior."""
    first, bias, last, shift = (PRIOR_SCALE * u).split([HIDDEN, HIDDEN, HIDDEN, 1], -1)
    hidden = nn.functional.softplus(x * first.unsqueeze(1) + bias.unsqueeze(1))
    return (hidden * last.unsqueeze(1)).sum(-1) + shift


def energy(u: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the negative logarithm of the posterior, up to a constant."""
    x, y = batch
    return 0.5 * ((y - functions(u, x)) / NOISE).square().sum(-1) + 0.5 * u.square().sum(-1)


def energy_and_slope(u: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights, detached, with their energy and its gradient."""
    u = u.detach().requires_grad_()
    value = energy(u, batch)
    (slope,) = torch.autograd.grad(value.sum(), u)
    return u.detach(), value.detach(), slope


def summary(name: str, loc: Tensor, variance: Tensor) -> Row:
    """Return root mean squares over inputs."""
    found = {f"sd_{name}": math.sqrt(max(float(variance.mean()), 0.0))}
    if name == "data":
        truth = torch.sin(2 * places()["data"]).reshape(-1)
        found["error"] = float((loc - truth).square().mean().sqrt())
    return found


def report(rows: list[Row], folder: Path) -> str:
    """A line for each method, from the widest in the gap to the narrowest."""
    found = {name: [row for row in rows if row["method"] == name] for name in (REFERENCE, *METHODS)}
    found = {name: sorted(those, key=lambda row: row["seed"]) for name, those in found.items() if those}
    reference = {row["seed"]: row for row in found[REFERENCE]}
    names = sorted(
        METHODS.keys() & found.keys(), key=lambda name: -mean(row["sd_gap"] for row in found[name])
    )
    lines = []
    for name in (REFERENCE, *names):
        cells = [mean_sd([row[key] for row in found[name]], 3) for key in ("sd_gap", "sd_data", "error")]
        ratio = mean(row["sd_gap"] / reference[row["seed"]]["sd_gap"] for row in found[name])
        lines.append([name, cells[0], f"{ratio:.2f}", *cells[1:]])
    agree = max(row[key] for row in reference.values() for key in ("r_hat_gap", "r_hat_data"))
    return (
        f"{provenance(BENCHMARK.name, rows)} Float64.\n\n{NUM_DATA} points of sin 2x with noise {NOISE:g}, at "
        f"{START:g} < |x| < {END:g}; {HIDDEN} softplus units, N(0, {PRIOR_SCALE:g}²) priors, KL weight 1, {STEPS:,} "
        "steps. The standard deviation (sd) of the function, without the noise, is the root mean square over inputs in "
        "the middle half of the gap and among the data. Error: root mean squared error of the mean prediction among "
        f"the data. Mean ± standard deviation over seeds. Monte Carlo: {CHAINS} chains of {CHAIN} draws after {WARMUP} "
        f"warm-up draws, largest split R-hat of the function {agree:.2f}. Sampled VI, VOGN and VL predict with "
        f"{NUM_DRAWS} posterior samples here; by default, `predict` uses the mean for VL.\n\n"
        + table(
            ["method", "sd in the gap", "relative to Monte Carlo", "sd among data", "error among data"], lines
        )
    )


BENCHMARK = Benchmark(
    "gap",
    "How wide is each posterior where there are no data, compared with Hamiltonian Monte Carlo?",
    plan,
    run,
    report,
)
