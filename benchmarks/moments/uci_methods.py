# SPDX-License-Identifier: Apache-2.0
"""How each method trains and predicts: recipes, posteriors, objectives."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import cos, pi
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.infer.autoguide.initialization import init_to_value
from torch import Tensor

from benchmarks.moments.uci_network import INPUT_AXIS, Networks
from benchmarks.shared.regressions import Minibatch, Rows, TrainingSets
from pyro_dvi import predict
from pyro_dvi.bayesian import OptimalScale
from pyro_dvi.guides import MeanFieldGuide
from pyro_dvi.links import GaussHermite
from pyro_dvi.moment_propagation.elbo import MomentPropagationELBO, VarianceWeighted
from pyro_dvi.moment_propagation.multiplicative_noise import MultiplicativeNoiseGuide
from pyro_dvi.predictive import FullCovariance, Moments, Samples

DRAWS = 100  # of weights or dropout masks, for methods that predict with samples
Loss = Callable[[Minibatch], Tensor]


@dataclass(frozen=True)
class Recipe:
    """Adam with cosine decay; each observation weighted by its noise variance at first, by nothing in the end."""

    steps: int = 3000
    learning_rate: float = 0.02
    weighted_until: float = 0.6  # part of the training after which weights are equal
    warm_up: float = 0.5  # part of the training over which the KL weight rises

    def weighting(self) -> VarianceWeighted:
        return VarianceWeighted(lambda step: max(0.0, 1 - step / (self.weighted_until * self.steps)), dim=0)

    def kl_schedule(self, step: int) -> float:
        return min(1.0, step / (self.warm_up * self.steps))

    def train(self, parameters: list[Tensor], loss: Loss, batches: Iterator[Minibatch]) -> None:
        optimizer = torch.optim.Adam(parameters, lr=self.learning_rate, fused=True)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 0.5 * (1 + cos(pi * step / self.steps))
        )
        for batch in islice(batches, self.steps):
            optimizer.zero_grad()
            loss(batch).backward()
            optimizer.step()
            schedule.step()


@dataclass(frozen=True)
class Fitted:
    """Trained networks with their data; a method's prediction rule scores them."""

    model: Networks
    guide: Any
    data: TrainingSets

    def score(self, rows: list[Rows], method: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Log predictive density and mean at rows of each network, in raw units, and where they are no padding."""
        examples, valid = self.data.examples(rows)
        result = predict(self.model, self.guide, (examples.x, examples.y), method, observed="y", seed=0)
        log_density = result.log_likelihood().double() - self.data.y_scale.log()
        mean = result.mean.double() * self.data.y_scale + self.data.y_mean
        return log_density, mean, valid


class Method:
    """A way to train; ``candidates`` are values of its one hyper-parameter, whose meaning ``tuned`` says.

    Attributes:
        rule: how it predicts.
        members: networks of an ensemble whose scores are reported besides those of one network; 1 for none.
    """

    name: str
    tuned: str
    candidates: tuple[float, ...]
    rule: Any
    members = 1

    def __init__(self, recipe: Recipe | None = None) -> None:
        self.recipe = recipe or Recipe()

    def model(self, num_inputs: int, sizes: Tensor, values: Tensor) -> Networks:
        """Return networks with the hyper-parameter at ``values``, one each."""
        raise NotImplementedError

    def posterior(self, model: Networks, init: Any) -> tuple[Any, Callable[..., Tensor]]:
        """Return the guide and its differentiable loss of ``(x, y)``."""
        raise NotImplementedError

    def fit(self, data: TrainingSets, batch_size: int, values: Tensor, seed: int) -> Fitted:
        """Train one network on each training set, with the hyper-parameter at its entry of ``values``."""
        pyro.clear_param_store()
        pyro.set_rng_seed(seed)
        model = self.model(data.x.shape[-1], data.sizes, values)
        guide, objective = self.posterior(model, init_to_value(values=model.initial_weights(seed)))
        first = next(data.minibatches(batch_size, seed))
        guide(first.x, first.y)

        def loss(batch: Minibatch) -> Tensor:
            value = objective(batch.x, batch.y)
            model.step += 1
            model.warm_up = self.recipe.kl_schedule(model.step) if self.warms_up else 1.0
            return value

        self.recipe.train(
            [*model.parameters(), *guide.parameters()], loss, data.minibatches(batch_size, seed)
        )
        return Fitted(model, guide, data)

    warms_up = False


class MNVI(Method):
    """Multiplicative noise by moment propagation, with a Gauss-Hermite mixture over the noise for prediction."""

    name = "MNVI, ours"
    tuned = "KL weight"
    candidates = (0.1, 0.3, 0.5, 1.0)
    rule = Moments(noise=GaussHermite(32))
    members = 5
    full_covariance = False

    def model(self, num_inputs: int, sizes: Tensor, values: Tensor) -> Networks:
        return Networks(num_inputs, sizes, kl_weights=values)

    def guide(self, model: Networks, init: Any) -> Any:
        """Return the posterior."""
        return MultiplicativeNoiseGuide(model, init_loc_fn=init, input_axis=INPUT_AXIS)

    def posterior(self, model: Networks, init: Any) -> tuple[Any, Callable[..., Tensor]]:
        guide = self.guide(model, init)
        elbo = MomentPropagationELBO(
            kl_weight=self.recipe.kl_schedule,
            weighting=self.recipe.weighting(),
            full_covariance=self.full_covariance,
            variance_floor=1e-8,
        )

        def objective(x: Tensor, y: Tensor) -> Tensor:
            # The model scales the prior of each network: without this the entropy would keep the weight one.
            return elbo.differentiable_loss(model, poutine.scale(guide, scale=model.kl_weights), x, y)

        return guide, objective


class MeanFieldMoments(MNVI):
    """Mean-field Gaussians by moment propagation: deterministic VI without covariances (dDVI)."""

    name = "mean-field moments"

    def guide(self, model: Networks, init: Any) -> Any:
        return MeanFieldGuide(model, init_loc_fn=init)


class FullCovarianceMoments(MeanFieldMoments):
    """Mean-field Gaussians by moment propagation with the covariances between activations: deterministic VI (DVI)."""

    name = "DVI (full covariance)"
    rule = Moments(noise=GaussHermite(32), propagation=FullCovariance())
    full_covariance = True


class FixedWeight(FullCovarianceMoments):
    """DVI at a KL weight of 1: nothing is tuned."""

    name = "DVI, KL weight 1"
    tuned = "nothing"
    candidates = (1.0,)


class EmpiricalBayes(FixedWeight):
    """The same with prior variances that are optimal given the posterior: both parts of the paper on DVI."""

    name = "DVI, empirical Bayes"

    def model(self, num_inputs: int, sizes: Tensor, values: Tensor) -> Networks:
        return Networks(num_inputs, sizes, kl_weights=values, alpha=OptimalScale().alpha)


class SampledVI(Method):
    """Mean-field VI by Pyro: AutoNormal and Trace_ELBO, prediction with samples."""

    name = "AutoNormal + Trace_ELBO"
    tuned = "KL weight"
    candidates = (0.03, 0.1, 0.3, 1.0)
    rule = Samples(DRAWS)
    warms_up = True

    def model(self, num_inputs: int, sizes: Tensor, values: Tensor) -> Networks:
        return Networks(num_inputs, sizes, kl_weights=values)

    def posterior(self, model: Networks, init: Any) -> tuple[Any, Callable[..., Tensor]]:
        model.weighting = self.recipe.weighting()
        guide = AutoNormal(model, init_loc_fn=init, init_scale=0.05)
        elbo = Trace_ELBO()

        def objective(x: Tensor, y: Tensor) -> Tensor:
            tempered = poutine.scale(guide, scale=model.kl_weights * model.warm_up)
            return elbo.differentiable_loss(model, tempered, x, y)

        return guide, objective
