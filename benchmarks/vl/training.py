# SPDX-License-Identifier: Apache-2.0
"""One training for every method that Variational Laplace is compared with: same network, priors, optimizer, epochs.

What differs is the guide and the objective. At checkpoints the model is scored on validation and test images; the
reports choose KL weight and checkpoint by validation alone.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from pyro import poutine
from pyro.infer import SVI
from pyro.infer.autoguide import AutoDelta, AutoNormal
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import pyro_dvi as dvi
from benchmarks.shared.benchmark import Row
from benchmarks.shared.images import ImageSplit
from benchmarks.shared.networks import num_weights
from pyro_dvi.bayesian import classifier, fan_in, init_to_module, to_bayesian_
from pyro_dvi.predictive.metrics import accuracy, expected_calibration_error

NUM_SAMPLES = 10  # draws of the weights for one prediction


@dataclass(frozen=True)
class Recipe:
    """How to train, whatever the method.

    Attributes:
        epochs: of training.
        checkpoints: epochs at which the model is scored.
        lr: step size of Adam on the means.
        scale_multiplier: step size of the logarithms of posterior scales over that of the means.
        batch_size: images of a minibatch.
        one_cycle: whether step sizes rise over the first fifth of the steps and then fall to zero.
        mirror: whether images are mirrored at random.
    """

    epochs: int
    checkpoints: tuple[int, ...]
    lr: float = 3e-3
    scale_multiplier: float = 10.0
    batch_size: int = 100
    one_cycle: bool = False
    mirror: bool = False


class Minibatches:
    """Shuffled minibatches of images in memory, in an order of their own for each epoch and seed."""

    def __init__(self, data: tuple[Tensor, Tensor], recipe: Recipe, seed: int) -> None:
        self.data, self.recipe = data, recipe
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return math.ceil(len(self.data[0]) / self.recipe.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = self.data
        for rows in torch.randperm(len(x), generator=self.generator).split(self.recipe.batch_size):
            images = x[rows.to(x.device)]
            if self.recipe.mirror:
                turned = torch.rand(len(rows), generator=self.generator) < 0.5
                images = torch.where(turned.to(x.device)[:, None, None, None], images.flip(-1), images)
            yield images, y[rows.to(y.device)]


Posterior = Callable[[Any], tuple[Any, Any]]  # model -> guide and objective


def posterior(method: str, kl_weight: float) -> Posterior:
    """Return what makes the guide and the objective of "MAP", "VI" (weights are drawn) or "VL"."""
    taylor = partial(dvi.TaylorELBO, kl_weight=kl_weight)
    if method == "MAP":
        return lambda model: (AutoDelta(model, init_loc_fn=init_to_module), taylor())
    if method == "VI":
        guide = partial(AutoNormal, init_loc_fn=init_to_module, init_scale=0.01)
        return lambda model: (guide(model), dvi.SampledELBO(kl_weight=kl_weight))
    return lambda model: (dvi.MeanFieldGuide(model), taylor())


def train(net: nn.Module, data: ImageSplit, make: Posterior, recipe: Recipe, seed: int) -> Row:
    """Train, and return what was measured at the checkpoints.

    Args:
        net: whose parameters get He priors.
        data: standardised images.
        make: from the model to guide and objective.
        recipe: how to train.
        seed: of the minibatches.
    """
    x = data.train[0]
    weights = num_weights(net)
    model = classifier(to_bayesian_(net.to(x.device), prior_scale=fan_in), num_data=len(x))
    guide, elbo = make(model)
    batches = Minibatches(data.train, recipe, seed)
    rates = dvi.optim.learning_rates(recipe.lr, scale_multiplier=recipe.scale_multiplier)
    schedule = {"scheduler": partial(LambdaLR, lr_lambda=OneCycle(recipe.epochs * len(batches)))}
    optimizer = dvi.optim.Adam(rates, **(schedule if recipe.one_cycle else {}))
    svi = SVI(model, guide, optimizer, elbo)
    every_step = dvi.training.EveryStep(optimizer) if recipe.one_cycle else None
    rules = ("mean", "samples") if not isinstance(guide, AutoDelta) else ("mean",)
    checkpoints: list[Row] = []
    seconds = 0.0
    history = dvi.training.History()
    for epoch in recipe.checkpoints:
        start, before = time.perf_counter(), checkpoints[-1]["epoch"] if checkpoints else 0
        try:
            dvi.fit(svi, batches, epoch - before, progress=False, lr_schedule=every_step, history=history)
        except dvi.errors.NonFiniteError:
            break  # the report says how many epochs there were
        seconds += time.perf_counter() - start
        found = {} if isinstance(guide, AutoDelta) else untempered(elbo, model, guide, data)
        scores = {rule: score(model, guide, data, rule) for rule in rules}
        checkpoints.append({"epoch": epoch, **found, **scores})
    return {
        "weights": weights,
        "seconds_per_epoch": seconds / recipe.epochs,
        "checkpoints": checkpoints,
    }


@dataclass(frozen=True)
class OneCycle:
    """Factor of the step size: linear up to one over a fifth of the steps, then linear down to zero."""

    steps: int

    def __call__(self, step: int) -> float:
        share = step / self.steps
        return max(0.0, min(0.05 + share / 0.2, (1 - share) / 0.8))


@torch.no_grad()
def untempered(elbo: Any, model: Any, guide: Any, data: ImageSplit) -> Row:
    """Return the ELBO at KL weight 1 per training example, whatever the training used, on 1,000 of them.

    It is the objective's own: expanded to second order for Variational Laplace, of drawn weights for sampled VI.
    """
    model.eval()
    batch = [part[:1000] for part in data.train]
    values = []
    for _ in range(1 if isinstance(elbo, dvi.TaylorELBO) else NUM_SAMPLES):
        elbo.loss(model, guide, *batch)
        terms = {name: float(value) for name, value in elbo.terms.items()}
        values.append(terms["log_likelihood"] - terms.get("penalty", 0.0) - terms["kl"])
    model.train()
    return {"untempered_elbo": sum(values) / len(values) / len(data.train[0]), "kl": terms["kl"]}


def score(model: Any, guide: Any, data: ImageSplit, rule: str) -> Row:
    """Return validation NLL and test metrics of predictions at the "mean" or by "samples"."""
    draws = NUM_SAMPLES if rule == "samples" else 0
    state = torch.get_rng_state()
    model.eval()
    valid = log_probabilities(model, guide, data.validation[0], draws)
    test, y = log_probabilities(model, guide, data.test[0], draws), data.test[1]
    model.train()
    torch.set_rng_state(state)
    temperature = fit_temperature(valid, data.validation[1])
    return {
        "validation_nll": nll(valid, data.validation[1]),
        "nll": nll(test, y),
        "ece": float(expected_calibration_error(test.exp(), y)),
        "accuracy": float(accuracy(test.exp(), y)),
        "temperature": temperature,
        "nll_temperature_scaled": nll((test / temperature).log_softmax(-1), y),
    }


@torch.no_grad()
def log_probabilities(model: Any, guide: Any, x: Tensor, draws: int) -> Tensor:
    """Log class probabilities at the posterior mean (draws = 0) or averaged over posterior draws, in float64."""
    values = [guide.median()] if draws == 0 else [guide() for _ in range(draws)]
    per_draw = []
    for value in values:
        parts = []
        for batch in x.split(1000):
            trace = poutine.trace(poutine.condition(model, data=value)).get_trace(batch)
            (fn,) = [s["fn"] for s in trace.nodes.values() if hasattr(s.get("fn"), "logits")]
            parts.append(fn.logits.double().log_softmax(-1))
        per_draw.append(torch.cat(parts))
    return torch.stack(per_draw).logsumexp(0) - math.log(len(per_draw))


def nll(log_probs: Tensor, y: Tensor) -> float:
    return -log_probs.gather(1, y[:, None]).mean().item()


def fit_temperature(log_probs: Tensor, y: Tensor) -> float:
    grid = torch.linspace(0.5, 3.0, 251, dtype=torch.float64)
    return float(min(grid.tolist(), key=lambda t: nll((log_probs / t).log_softmax(-1), y)))
