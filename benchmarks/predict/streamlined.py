# SPDX-License-Identifier: Apache-2.0
"""Standard deviations of outputs by one pass: ``Moments`` beside streamlined prediction of the package ``suq``.

One diagonal Gaussian over the weights of a small network, and five ways to the Gaussian of its outputs: exact
linearisation (Jacobians by ``torch.func``), suq, ``Moments()`` with ``Independent()`` and with ``ReverseDelta()``, and
10,000 draws of the weights.
"""

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from statistics import median
from typing import Any

import pyro
import torch
from pyro.infer import SVI
from torch import Tensor, nn
from torch.distributions import Normal
from torch.func import functional_call, jacrev, vmap
from torch.utils.data import DataLoader, TensorDataset

import pyro_dvi as dvi
from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings
from benchmarks.shared.images import digits_split
from benchmarks.shared.regressions import folds, hold_out, load, standards
from benchmarks.shared.suq_package import streamlined
from benchmarks.shared.tables import mean_sd, provenance, table
from pyro_dvi.errors import DviWarning
from pyro_dvi.laplace import ByValidation, Diagonal

NUM_QUERIES, NUM_DRAWS, BATCH, ROUNDS = 256, 10_000, 128, 101
ACTIVATIONS = {"ReLU": nn.ReLU, "tanh": nn.Tanh}
POSTERIORS = ("Laplace", "mean-field")
KL_WEIGHT, EPOCHS = 0.1, 100
WAYS = ("suq", "Independent()", "ReverseDelta()")
PREPARED = "Independent(), by dvi.predictor"
LINEARISED, DRAWS = "exact linearisation", "10,000 draws"
Outputs = tuple[Tensor, Tensor]  # mean and standard deviation, [n, outputs]


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """Three tasks, two activations, two posteriors, three seeds; times of one of them."""
    quality = [
        {"what": "quality", "task": task, "activation": activation, "posterior": posterior, "seed": seed}
        for task in ("digits", "energy", "concrete")
        for activation in ACTIVATIONS
        for posterior in POSTERIORS
        for seed in range(3)
    ]
    return [
        *quality,
        {"what": "time", "task": "digits", "activation": "ReLU", "posterior": "Laplace", "seed": 0},
    ]


@dataclass(frozen=True)
class Task:
    """Data in float32, standardised; ``noise`` is None for classes."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    sizes: tuple[int, ...]
    noise: float | None = None

    @property
    def loader(self) -> DataLoader:
        """Shuffled training batches."""
        return DataLoader(TensorDataset(*self.train), 50, shuffle=True)

    def model(self, net: nn.Module) -> Any:
        """The likelihood of the task around a network."""
        count = len(self.train[0])
        return dvi.classifier(net, count) if self.noise is None else dvi.regressor(net, count, self.noise)


def _task(name: str, seed: int, data_dir: str | None) -> Task:
    if name == "digits":
        split = digits_split(600, 200, seed)
        parts = [(x.flatten(1), y) for x, y in (split.train, split.validation, split.test)]
        return Task(*parts, sizes=(64, 100, 100, 10))
    x, y = load(name, data_dir)
    inside, test = folds(len(x))[seed]
    train, validation = hold_out(inside, 5, 0)
    (x_mean, y_mean), (x_sd, y_sd) = zip(*(standards([v[train]]) for v in (x, y[:, None])), strict=True)
    x, y = ((x - x_mean) / x_sd).float(), ((y[:, None] - y_mean) / y_sd).float()[:, 0]
    return Task(
        *((x[part], y[part]) for part in (train, validation, test)), sizes=(x.shape[1], 50, 50, 1), noise=1.0
    )


def _trained(task: Task, activation: str) -> tuple[nn.Sequential, Task]:
    """A network trained with weight decay, and the task with the noise that validation data show."""
    net = _net(task, activation)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3, weight_decay=1e-2)
    loss = nn.functional.cross_entropy if task.noise is None else nn.functional.mse_loss
    for _ in range(EPOCHS):
        for x, y in task.loader:
            optimizer.zero_grad()
            loss(net(x) if task.noise is None else net(x)[:, 0], y).backward()
            optimizer.step()
    if task.noise is None:
        return net, task
    x, y = task.validation
    with torch.no_grad():
        return net, replace(task, noise=float((net(x)[:, 0] - y).square().mean().sqrt()))


def _net(task: Task, activation: str) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in zip(task.sizes[:-1], task.sizes[1:], strict=True):
        layers += [nn.Linear(inputs, outputs), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers[:-1])


@dataclass(frozen=True)
class Posterior:
    """Independent Gaussians over the parameters of a network: means and standard deviations by name."""

    locs: dict[str, Tensor]
    scales: dict[str, Tensor]

    def guide(self, model: Any, x: Tensor, y: Tensor) -> dvi.MeanFieldGuide:
        """The same Gaussians as a guide of a model, which is looked at with inputs and observations."""
        guide = dvi.MeanFieldGuide(model)
        guide.initialize(x, y)
        for name in self.locs:
            owner, _, leaf = f"net.{name}".rpartition(".")
            setattr(guide.locs.get_submodule(owner), leaf, nn.Parameter(self.locs[name]))
            setattr(guide.scales.get_submodule(owner), leaf, self.scales[name])
        return guide


def _posterior(task: Task, net: nn.Sequential, activation: str, kind: str) -> Posterior:
    """Laplace's diagonal approximation around the network, or mean-field inference that starts from it."""
    bayesian = _net(task, activation)
    bayesian.load_state_dict(net.state_dict())
    model = task.model(dvi.to_bayesian_(bayesian, prior_scale=dvi.bayesian.fan_in))
    guide: Any
    with warnings.catch_warnings():  # of kinks and of a mode that is no minimum: any Gaussian will do here
        warnings.simplefilter("ignore", DviWarning)
        if kind == "Laplace":
            guide = dvi.LaplaceGuide(model)
            guide.fit(task.loader, Diagonal(), unconverged="accept")
            validation = DataLoader(TensorDataset(*task.validation), BATCH)
            guide.tune(task.loader, criterion=ByValidation(validation))
        else:
            guide = dvi.MeanFieldGuide(model)
            svi = SVI(
                model,
                guide,
                dvi.optim.Adam(dvi.optim.learning_rates(3e-3)),
                dvi.SampledELBO(kl_weight=KL_WEIGHT),
            )
            dvi.fit(svi, task.loader, epochs=EPOCHS, progress=False)
    found = guide.get_posterior(*task.test)
    names = [name for name, _ in net.named_parameters()]
    return Posterior(
        {name: found[f"net.{name}"].mean.detach() for name in names},
        {name: found[f"net.{name}"].stddev.detach() for name in names},
    )


def _contestants(task: Task, posterior: Posterior, activation: str) -> dict[str, Callable[[Tensor], Outputs]]:
    """By name: from inputs to mean and standard deviation of the outputs of the network."""
    net = _net(task, activation)
    net.load_state_dict(posterior.locs)
    variances = torch.cat([scale.square().flatten() for scale in posterior.scales.values()])
    suq = streamlined(net, variances, "regression")
    x = task.train[0][:2]
    # With noise of variance 1 around the outputs, whatever the task is.
    model = dvi.regressor(
        dvi.to_bayesian_(_net(task, activation), prior_scale=dvi.bayesian.fan_in),
        NUM_QUERIES,
        noise_scale=1.0,
    )
    pyro.clear_param_store()  # of the guide that was trained
    guide = posterior.guide(model, x, net(x).detach())

    def by_suq(x: Tensor) -> Outputs:
        mean, variance = suq.forward_latent(x, None)
        return mean.detach(), variance.detach().sqrt()

    def by_moments(predict: Callable[[Tensor], Any]) -> Callable[[Tensor], Outputs]:
        def outputs(x: Tensor) -> Outputs:
            found = predict(x)
            mean, variance = (value.reshape(len(x), -1) for value in (found.mean, found.variance))
            return mean, (variance - 1).clamp_min(0).sqrt()

        return outputs

    reverse_delta = dvi.Moments(propagation=dvi.ReverseDelta())
    return {
        "suq": by_suq,
        "Independent()": by_moments(lambda x: dvi.predict(model, guide, x, dvi.Moments())),
        PREPARED: by_moments(dvi.predictor(model, guide, x, dvi.Moments())),
        "ReverseDelta()": by_moments(lambda x: dvi.predict(model, guide, x, reverse_delta)),
        LINEARISED: lambda x: _linearised(net, posterior, x),
        DRAWS: lambda x: _drawn(net, posterior, x),
    }


def _linearised(net: nn.Module, posterior: Posterior, x: Tensor) -> Outputs:
    def outputs(weights: dict[str, Tensor], one: Tensor) -> Tensor:
        return functional_call(net, weights, one)

    slopes = vmap(jacrev(outputs), (None, 0))(posterior.locs, x)
    variance = sum(
        (slopes[name].square() * scale.square()).flatten(2).sum(-1)
        for name, scale in posterior.scales.items()
    )
    return net(x).detach(), variance.sqrt()


@torch.no_grad()
def _drawn(net: nn.Module, posterior: Posterior, x: Tensor) -> Outputs:
    drawn = torch.cat(list(_draws(net, posterior, x)))
    return drawn.mean(0), drawn.std(0)


def _draws(net: nn.Module, posterior: Posterior, x: Tensor) -> Iterator[Tensor]:
    """Give outputs ``[100, n, outputs]`` at 100 draws of the weights, until there are enough."""
    for _ in range(NUM_DRAWS // 100):
        weights = {
            name: loc + posterior.scales[name] * torch.randn(100, *loc.shape)
            for name, loc in posterior.locs.items()
        }
        yield vmap(lambda w: functional_call(net, w, x))(weights)


def _nll(task: Task, outputs: Outputs, y: Tensor) -> float:
    """Of Gaussian outputs: with their noise, or with their softmax averaged over 1,000 draws of the outputs."""
    mean, sd = outputs
    if task.noise is not None:
        return -float(Normal(mean[:, 0], (sd[:, 0].square() + task.noise**2).sqrt()).log_prob(y).mean())
    generator = torch.Generator().manual_seed(0)
    logits = mean + sd * torch.randn(1000, *mean.shape, generator=generator)
    return float(nn.functional.nll_loss(logits.log_softmax(-1).logsumexp(0) - log(1000), y))


def _rank_correlation(a: Tensor, b: Tensor) -> float:
    ranks = [value.flatten().argsort().argsort().float() for value in (a, b)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def run(settings: Settings, data_dir: str | None) -> Row:
    """Train, build the Gaussian, and hold every way to the outputs against the two references; or take times."""
    activation = settings["activation"]
    net, task = _trained(_task(settings["task"], settings["seed"], data_dir), activation)
    posterior = _posterior(task, net, activation, settings["posterior"])
    contestants = _contestants(task, posterior, activation)
    x, y = (part[:NUM_QUERIES] for part in task.test)
    if settings["what"] == "time":
        return {"milliseconds": _times(contestants, x[:BATCH])}
    found = {name: outputs(x) for name, outputs in contestants.items() if name != PREPARED}
    measured: Row = {}
    for name, outputs in found.items():
        mean, sd = outputs
        measured[name] = {"nll": _nll(task, outputs, y)}
        for reference in (LINEARISED, DRAWS):
            other = found[reference][1]
            measured[name] |= {
                f"ratio to {reference}": float((sd / other).median()),
                f"ranks with {reference}": _rank_correlation(sd, other),
            }
    return measured


def _times(contestants: dict[str, Callable[[Tensor], Outputs]], x: Tensor) -> dict[str, float]:
    """Median milliseconds for a batch, by turns."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants if name != DRAWS}
    for _ in range(ROUNDS):
        for name, taken in seconds.items():
            start = time.perf_counter()
            contestants[name](x)
            taken.append(time.perf_counter() - start)
    return {name: 1000 * median(taken[1:]) for name, taken in seconds.items()}


def report(rows: list[Row], folder: Path) -> str:
    """One row for each network and posterior, and each way to the outputs."""
    lines: list[list[object]] = []
    quality = [row for row in rows if row["what"] == "quality"]
    cases = sorted({(row["task"], row["activation"], row["posterior"]) for row in quality})
    for case in cases:
        group = [row for row in quality if (row["task"], row["activation"], row["posterior"]) == case]
        for name in (*WAYS, LINEARISED, DRAWS):
            cells = [
                None if reference == name else mean_sd([row[name][f"{what} {reference}"] for row in group], 2)
                for reference in (LINEARISED, DRAWS)
                for what in (("ratio to", "ranks with"))
            ]
            lines.append([", ".join(case), name, *cells, mean_sd([row[name]["nll"] for row in group])])
    header = ["task, activation, posterior", "method"]
    for reference in ("exact linearisation", "10,000 draws"):
        header += [f"sd ratio to {reference}", "rank correlation"]
    text = [INTRODUCTION, table([*header, "NLL"], lines)]
    for row in rows:
        if row["what"] == "time":
            times = row["milliseconds"]
            text.append(
                f"Milliseconds for a batch of {BATCH} digits, median of {ROUNDS - 1} alternating rounds:\n"
            )
            text.append(table(list(times), [[f"{value:.2f}" for value in times.values()]]))
    return "\n".join([*text, provenance("streamlined", rows)])


INTRODUCTION = f"""\
Five methods compute the mean and standard deviation (sd) of the outputs at {NUM_QUERIES} test inputs, for the same
diagonal Gaussian over the weights of a network with two hidden layers (digits 64-100-100-10, regressions d-50-50-1).
The sd ratio is the median over inputs and outputs. NLL: test NLL with independent Gaussian outputs, averaged over 1,000
samples of the logits for digits, and with the noise of validation residuals for regressions, so that only the moments
differ. Posteriors: Laplace's diagonal approximation with the prior scale tuned on validation data, or a mean-field
Gaussian trained with `SampledELBO` at KL weight {KL_WEIGHT}. suq is release 0.1.0 with a scale factor of 1. ± is the
standard deviation over seeds.
"""

BENCHMARK = Benchmark(
    name="streamlined",
    question="Do Moments() and streamlined prediction give the standard deviations of the linearised network?",
    plan=plan,
    run=run,
    report=report,
    timed=True,
)
