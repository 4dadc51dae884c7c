# SPDX-License-Identifier: Apache-2.0
"""A Gaussian over the last layer: ours by moments beside the package vbll, both with the same network and tuning."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import pyro
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_dvi as dvi
from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings
from benchmarks.shared.images import digits_split, load_split
from benchmarks.shared.networks import mlp
from benchmarks.shared.regressions import folds, hold_out, load
from benchmarks.shared.tables import mean_sd, paired, provenance, table
from benchmarks.shared.tasks import Data, regression_of
from pyro_dvi.bayesian import LearnedScale, classifier, fan_in, regressor, to_bayesian_
from pyro_dvi.expectations.logits import LogitEstimator
from pyro_dvi.guides import MeanField
from pyro_dvi.moment_propagation.last_layer import LowRank, PerOutput
from pyro_dvi.moments import GaussianMoments

__all__ = ["BENCHMARK"]

SEEDS, KL_WEIGHTS, RATES = (0, 1, 2, 3, 4), (0.01, 0.1, 1.0), (5e-3, 2e-2)
MAX_STEPS, EVERY, PATIENCE, BATCH, NUM_POINTS = 1_500, 50, 6, 64, 256
SIZES = {
    "energy": (8, 50, 1),
    "yacht": (6, 50, 1),
    "boston": (13, 50, 1),
    "wine-quality-red": (11, 50, 1),
    "digits": (64, 64, 10),
    "Fashion-MNIST, 2,000 images": (784, 100, 10),
}
IMAGES = ("digits", "Fashion-MNIST, 2,000 images")


@dataclass(frozen=True)
class Problem:
    """One training: a task, the data of a seed, and the weight of prior and divergence against the likelihood."""

    task: str
    data: Data
    kl_weight: float

    @property
    def classes(self) -> bool:
        return self.task in IMAGES

    @property
    def num_data(self) -> int:
        return len(self.data.train[1])

    def network(self) -> nn.Sequential:
        return mlp(SIZES[self.task], nn.ReLU)


class Learner:
    """Something that is trained by its loss per example, and gives log densities."""

    module: nn.Module
    groups: Any

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError

    def log_prob(self, x: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError


def _data(task: str, seed: int, data_dir: str | None) -> Data:
    if task in IMAGES:
        split = (
            digits_split(598, 300, seed)
            if task == "digits"
            else load_split("FashionMNIST", 2000, 1000, 3000, seed, data_dir)
        )
        return Data(split.train, split.validation, split.test)
    rest, test = folds(len(load(task, data_dir)[1]), 10)[seed]
    return regression_of(task, (*hold_out(rest, 10, 0, seed), test), data_dir)


# Ours ---------------------------------------------------------------------------------------------------------


class Jensen(LogitEstimator):
    r"""The upper bound :math:`\log\sum_c e^{\mu_c + v_c / 2}` of vbll."""

    def expected_logsumexp(self, logits: GaussianMoments) -> Tensor:
        return torch.logsumexp(logits.loc + 0.5 * logits.variance, -1)


class ByMoments(Learner):
    """``LastLayerGuide`` trained by ``MomentPropagationELBO``; point masses only for MAP."""

    def __init__(
        self, problem: Problem, covariance: Any, estimator: LogitEstimator | None = None, wide: bool = False
    ) -> None:
        net, num_data = problem.network(), problem.num_data
        if wide:  # the start of vbll
            nn.init.normal_(net[-1].weight, std=(2 / net[-1].in_features) ** 0.5)
        net = to_bayesian_(net, prior_scale=fan_in)
        model: Any = classifier(net, num_data)
        if not problem.classes:
            model = regressor(net, num_data, noise_scale=LearnedScale(0.3))
        if covariance is None:
            guide: Any = pyro.infer.autoguide.AutoDelta(model, init_loc_fn=dvi.bayesian.init_to_module)
        else:
            guide = dvi.LastLayerGuide(model, "net.3", covariance=covariance)
        self.model, self.guide, self.num_data = model, guide, num_data
        elbo = dvi.MomentPropagationELBO(kl_weight=problem.kl_weight, estimator=estimator)
        self.rule = dvi.AtMean() if covariance is None else dvi.Moments()
        self.module = elbo(model, guide)
        self.module(*[part[:2] for part in problem.data.train])
        self.groups = partial(dvi.optim.parameter_groups, self.module, scale_multiplier=10)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.module(x, y) / self.num_data

    def log_prob(self, x: Tensor, y: Tensor) -> Tensor:
        prediction = dvi.predict(self.model, self.guide, x, method=self.rule)
        return -torch.tensor(prediction.metrics(y)["nll"])


# Theirs -------------------------------------------------------------------------------------------------------


class Vbll(Learner):
    """The package's layer on our hidden layer, which has the Normal prior that ours has."""

    def __init__(self, problem: Problem, covariance: str, bound: str = "jensen", noise: bool = True) -> None:
        import vbll

        *hidden, last = problem.network()
        self.hidden, self.problem = nn.Sequential(*hidden), problem
        layer = vbll.DiscClassification if problem.classes else vbll.Regression
        weight = problem.kl_weight / problem.num_data
        self.layer = layer(last.in_features, last.out_features, weight, parameterization=covariance)
        if bound == "samples":
            self.layer.softmax_bound = partial(self.layer.montecarlo_bound, n_samples=64)
        self.module = nn.ModuleList([self.hidden, self.layer])
        if not noise:
            self.layer.noise_logdiag.requires_grad_(False).fill_(-10.0)
        self.groups = self._groups

    def _groups(self, base: float) -> list[dict[str, Any]]:
        return [{"params": list(self.module.parameters()), "lr": base}]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        prior = 0.0
        for layer in self.hidden:
            if isinstance(layer, nn.Linear):
                variance = 2 / layer.in_features
                prior = prior + sum(p.square().sum() for p in layer.parameters()) / (2 * variance)
        target = y if self.problem.classes else y[:, None]
        data = self.layer(self.hidden(x)).train_loss_fn(target)
        return data + self.problem.kl_weight / self.problem.num_data * prior

    def log_prob(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.hidden(x)
        if self.problem.classes:
            p = self.layer.predictive(h, n_samples=NUM_POINTS)
            return p.gather(1, y[:, None])[:, 0].clamp_min(1e-30).log()
        return self.layer.predictive(h).log_prob(y[:, None]).sum(-1)


LEARNERS: dict[str, Callable[[Problem], Learner]] = {
    "MAP": partial(ByMoments, covariance=None),
    "diagonal": partial(ByMoments, covariance=MeanField()),
    "low rank": partial(ByMoments, covariance=LowRank(4)),
    "dense": partial(ByMoments, covariance=PerOutput()),
    "vbll, diagonal": partial(Vbll, covariance="diagonal"),
    "vbll, dense": partial(Vbll, covariance="dense"),
}
# What differs between the two, one at a time, on the digits.
VARIANTS: dict[str, Callable[[Problem], Learner]] = {
    "diagonal, Jensen's bound": partial(ByMoments, covariance=MeanField(), estimator=Jensen()),
    "diagonal, wide start": partial(ByMoments, covariance=MeanField(), wide=True),
    "vbll, diagonal, no noise of logits": partial(Vbll, covariance="diagonal", noise=False),
    "vbll, diagonal, samples for the bound": partial(Vbll, covariance="diagonal", bound="samples"),
}


# One run ------------------------------------------------------------------------------------------------------


def run(settings: Settings, data_dir: str | None) -> Row:
    """Train until the validation NLL has not fallen for some time, and score the best state."""
    pyro.settings.set(module_local_params=True)
    task = settings["task"]
    data = _data(task, settings["seed"], data_dir)
    problem = Problem(task, data, settings["kl_weight"])
    learner = (LEARNERS | VARIANTS)[settings["method"]](problem)
    optimizer = torch.optim.Adam(learner.groups(base=settings["lr"]))
    loader = DataLoader(TensorDataset(*data.train), BATCH, shuffle=True)
    minibatches = chain.from_iterable(repeat(loader))
    best, state, since, steps = float("inf"), None, 0, 0
    while steps < MAX_STEPS and since < PATIENCE:
        for x, y in islice(minibatches, EVERY):
            optimizer.zero_grad()
            learner.loss(x, y).backward()
            optimizer.step()
        steps += EVERY
        score = _nll(learner, data.validation)
        since = 0 if score < best else since + 1
        if score < best:
            best, state = score, deepcopy(learner.module.state_dict())
    if state is not None:
        learner.module.load_state_dict(state)
    unit = data.log_unit
    return {
        "validation_nll": best + unit,
        "test_nll": _nll(learner, data.test) + unit,
        "steps": steps,
    }


def _nll(learner: Learner, pair: tuple[Tensor, Tensor]) -> float:
    learner.module.eval()
    with torch.no_grad():
        nll = -learner.log_prob(*pair).mean().item()
    learner.module.train()
    return nll if nll == nll else float("inf")


# Which runs, and what they say --------------------------------------------------------------------------------


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """All settings on the first seed; then the best ones on the others."""
    wanted = []
    for task in SIZES:
        for method in LEARNERS if task != "digits" else LEARNERS | VARIANTS:
            tried = [
                {"task": task, "method": method, "kl_weight": weight, "lr": rate, "seed": SEEDS[0]}
                for weight in KL_WEIGHTS
                for rate in RATES
            ]
            wanted += tried
            best = _chosen(rows, task, method)
            if best is not None:
                wanted += [{**best, "seed": seed} for seed in SEEDS[1:]]
    return wanted


def _chosen(rows: list[Row], task: str, method: str) -> Settings | None:
    """The settings of the best validation NLL on the first seed, once all were tried."""
    tried = [r for r in rows if (r["task"], r["method"], r["seed"]) == (task, method, SEEDS[0])]
    if len(tried) < len(KL_WEIGHTS) * len(RATES):
        return None
    best = min(tried, key=lambda row: row["validation_nll"])
    return {key: best[key] for key in ("task", "method", "kl_weight", "lr")}


def _scores(rows: list[Row], task: str, method: str) -> list[float]:
    """Test NLL by seed, with the chosen settings; empty while some are missing."""
    chosen = _chosen(rows, task, method)
    if chosen is None:
        return []
    found = {r["seed"]: r["test_nll"] for r in rows if all(r[k] == v for k, v in chosen.items())}
    return [found[seed] for seed in SEEDS] if set(SEEDS) <= found.keys() else []


def report(rows: list[Row], folder: Path) -> str:
    """Test NLL of each method, and paired differences to MAP and between ours and theirs."""
    tasks = [task for task in SIZES if any(row["task"] == task for row in rows)]
    parts = [
        "Test NLL in nats per example (of raw targets), mean ± standard deviation over five splits (regressions: "
        "five of ten folds; images: random training sets). One hidden layer of 50, 64 or 100 ReLU units. Every "
        f"method is tuned on the same grid of KL weights {KL_WEIGHTS} and step sizes {RATES}, by the validation NLL of "
        f"the first split; in every split, training stops early on validation data, after {MAX_STEPS} steps at most. "
        "Hidden layers have the same Normal prior in all methods; vbll has the priors, noise, bound and initial values "
        "of its package.\n",
        table(
            ["", *LEARNERS],
            [
                [task, *(mean_sd(s) if (s := _scores(rows, task, m)) else None for m in LEARNERS)]
                for task in tasks
            ],
        ),
        "Paired differences ± half the 95 % interval; negative if the first method is better, bold if the interval "
        "excludes zero.\n",
    ]
    pairs = [
        ("diagonal", "MAP"),
        ("low rank", "MAP"),
        ("dense", "MAP"),
        ("diagonal", "vbll, diagonal"),
        ("dense", "vbll, dense"),
        ("dense", "diagonal"),
    ]
    lines = []
    for task in tasks:
        scores = [(_scores(rows, task, a), _scores(rows, task, b)) for a, b in pairs]
        lines.append([task, *(paired(a, b) if a and b else None for a, b in scores)])
    parts.append(table(["", *(f"{a} minus {b}" for a, b in pairs)], lines))
    reference = _scores(rows, "digits", "diagonal"), _scores(rows, "digits", "vbll, diagonal")
    lines = []
    for name in VARIANTS:
        scores, base = _scores(rows, "digits", name), reference[name.startswith("vbll")]
        if scores and base:
            lines.append([name, mean_sd(scores), paired(scores, base)])
    parts.append("Effect of each difference between the two packages, one at a time, on the digits.\n")
    parts.append(table(["", "test NLL", "difference from the unchanged method"], lines))
    parts.append(provenance("last_layer", rows))
    return "\n".join(parts)


BENCHMARK = Benchmark(
    name="last_layer",
    question="Does a Gaussian over the last layer help, and how does ours compare with vbll?",
    plan=plan,
    run=run,
    report=report,
)
