# SPDX-License-Identifier: Apache-2.0
"""How far do the default options of natural-gradient optimizers get, beside Adam at its best step size?

Three networks, and for each one condition changed at a time: the scale of the prior, the number of data, the size of
minibatches, the number of steps. MAP trains with Adam at five step sizes that fall to zero, VOGN, IVON and noisy K-FAC
with ``{}``, all from the same prior with KL weight 1. The posterior of the image networks is cold, at temperature 0.1;
that of the regression is Bayesian. Nothing else is tuned, and no score chooses anything but MAP's step size.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import pyro
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoDelta
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

import pyro_dvi as dvi
from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings
from benchmarks.shared.images import load_split
from benchmarks.shared.networks import conv_net, mlp
from benchmarks.shared.tables import provenance, table
from pyro_dvi.bayesian import fan_in, init_to_module

ADAM_STEPS, SEEDS = (0.001, 0.003, 0.01, 0.03, 0.1), (0, 1)
NATURAL = {
    "VOGN": (dvi.NaturalGradientGuide, dvi.VOGN),
    "IVON": (dvi.NaturalGradientGuide, dvi.IVON),
    "Noisy K-FAC": (dvi.KroneckerGuide, dvi.NoisyKFAC),
}
NOISE, GAP, END = 0.1, 0.5, 2.0
NETWORKS: dict[str, Callable[[], nn.Sequential]] = {
    "sin 3x": lambda: nn.Sequential(nn.Linear(1, 50), nn.Softplus(), nn.Linear(50, 1)),
    "MNIST, perceptron": lambda: mlp((784, 100, 100, 10)),
    "Fashion-MNIST, convolutions": conv_net,
}


@dataclass(frozen=True)
class Condition:
    """One condition of training.

    Attributes:
        task: a key of ``NETWORKS``.
        prior: scale of the prior, in units of He's for images.
        num_data: training examples.
        batch: size of minibatches.
        steps: about how many.
    """

    task: str
    prior: float = 1.0
    num_data: int = 2000
    batch: int = 100
    steps: int = 400


def conditions() -> list[Condition]:
    """One change at a time."""
    curve = Condition("sin 3x", num_data=100, steps=1000)
    found = [curve, *(replace(curve, prior=s) for s in (0.3, 3.0, 10.0))]
    found += [replace(curve, steps=n) for n in (300, 5000)] + [replace(curve, batch=32)]
    for task in ("MNIST, perceptron", "Fashion-MNIST, convolutions"):
        images = Condition(task)
        found += [images, *(replace(images, prior=s) for s in (0.1, 0.3, 3.0, 10.0))]
        found += [replace(images, steps=200), replace(images, steps=2000)]
        found += [replace(images, num_data=100, batch=50), replace(images, num_data=20_000, steps=1000)]
        found += [replace(images, batch=32), replace(images, batch=512)]
    return found


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """Ask for every condition, method and seed; the number of data goes up to 50,000 with ``gpu``."""
    found = conditions()
    if budget == "gpu":
        found += [replace(one, num_data=50_000) for one in found if one.num_data == 20_000]
    methods: list[Settings] = [{"method": "MAP", "lr": lr} for lr in ADAM_STEPS]
    methods += [{"method": name, "lr": 0.0} for name in NATURAL]
    return [{**asdict(one), **method, "seed": seed} for one in found for seed in SEEDS for method in methods]


def points(count: int) -> tuple[Tensor, Tensor]:
    """Points of the curve on both sides of a gap."""
    place = 2 * torch.rand(count) - 1
    x = place.sign() * GAP + place * (END - GAP)
    return x[:, None], torch.sin(3 * x) + NOISE * torch.randn(count)


def run(settings: Settings, data_dir: str | None) -> Row:
    """Train once and score other data; of the curve also its distance from the truth."""
    names = ("task", "prior", "num_data", "batch", "steps")
    condition = Condition(*(settings[name] for name in names))
    regression, net = condition.task == "sin 3x", NETWORKS[condition.task]()
    if regression:
        train, test = points(condition.num_data), points(1000)
        dvi.to_bayesian_(net, prior_scale=condition.prior)
        model: Any = dvi.regressor(net, condition.num_data, noise_scale=NOISE)
    else:
        kind = "MNIST" if condition.task.startswith("MNIST") else "FashionMNIST"
        split = load_split(kind, condition.num_data, 2000, 1, settings["seed"], data_dir)
        train, test = split.train, split.validation
        dvi.to_bayesian_(net, prior_scale=lambda *site: condition.prior * fan_in(*site))
        model = dvi.classifier(net, condition.num_data)
    epochs = max(1, round(condition.steps / math.ceil(condition.num_data / condition.batch)))
    loader = DataLoader(TensorDataset(*train), min(condition.batch, condition.num_data), shuffle=True)
    if settings["method"] == "MAP":
        guide: Any = AutoDelta(model, init_loc_fn=init_to_module)
        schedule = partial(CosineAnnealingLR, T_max=epochs)
        adam = dvi.optim.Adam(dvi.optim.learning_rates(settings["lr"]), scheduler=schedule)
        svi, rule = SVI(model, guide, adam, loss=dvi.SampledELBO()), dvi.AtMean()
    else:
        make_guide, optimizer = NATURAL[settings["method"]]
        guide = make_guide(model)
        elbo = dvi.NaturalGradientELBO(temperature=1.0 if regression else 0.1)
        svi, rule = SVI(model, guide, optimizer({}), loss=elbo), dvi.Samples(20)
    dvi.fit(svi, loader, epochs, progress=False)
    prediction = dvi.predict(model, guide, test, rule, seed=0)
    found = {"nll": prediction.metrics()["nll"]}
    if regression:
        error = prediction.mean.reshape(-1) - torch.sin(3 * test[0][:, 0])
        found["error"] = float(error.square().mean().sqrt())
    pyro.clear_param_store()
    return found


def report(rows: list[Row], folder: Path) -> str:
    """A line for each condition."""
    lines = []
    for condition in dict.fromkeys(tuple(row[name] for name in asdict(Condition(""))) for row in rows):
        own = [row for row in rows if tuple(row[name] for name in asdict(Condition(""))) == condition]
        by_step = {lr: [row["nll"] for row in own if row["lr"] == lr] for lr in ADAM_STEPS}
        by_step = {lr: mean(nlls) for lr, nlls in by_step.items() if nlls}
        if not by_step:
            continue
        best = min(by_step, key=lambda lr: by_step[lr])
        cells = []
        for name in NATURAL:
            found = [row for row in own if row["method"] == name]
            gap = f"{mean(row['nll'] for row in found) - by_step[best]:+.3f}" if found else None
            errors = [row["error"] for row in found if "error" in row]
            cells.append(f"{gap}; error {mean(errors):.3f}" if errors else gap)
        edge = " (at an end)" * (best in (ADAM_STEPS[0], ADAM_STEPS[-1]))
        lines.append([*condition, f"{by_step[best]:.3f} at {best:g}{edge}", *cells])
    header = ["task", "prior", "data", "batch", "steps", "MAP's NLL at its best step size"]
    header += [f"{name}({{}}) minus MAP's" for name in NATURAL]
    about = (
        "Mean NLL on 2,000 further images, or 1,000 further points, over the seeds; all methods except MAP predict "
        "with 20 posterior samples. Error: root mean squared distance of the mean prediction from the true curve."
    )
    return "\n\n".join([provenance(BENCHMARK.name, rows), about, table(header, lines)])


BENCHMARK = Benchmark(
    name="natural_defaults",
    question="How good are the default options of the natural-gradient optimizers, compared with a tuned Adam?",
    plan=plan,
    run=run,
    report=report,
)
