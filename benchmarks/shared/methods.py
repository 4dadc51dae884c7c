# SPDX-License-Identifier: Apache-2.0
"""The methods that are compared: each turns a network into a model, its trained guide and a prediction rule."""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from pyro.infer import SVI
from pyro.infer.autoguide import AutoDelta, AutoNormal
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import pyro_dvi as dvi
from pyro_dvi.errors import DviWarning
from pyro_dvi.predictive import AtMean, PredictionRule, Samples

__all__ = ["METHODS", "NUM_SAMPLES", "Method", "Training", "with_dropout"]

NUM_SAMPLES = 20  # of weights or of dropout masks, for what predicts by sampling
DROPOUT = 0.1


@dataclass(frozen=True)
class Training:
    """What every method is given.

    Attributes:
        kl_weight: of the objective.
        lr: step size of Adam for means; posterior scales have ten times that.
        epochs: length of training, over which the step size falls to zero as a cosine.
        loader: minibatches.
        validation: a pair of inputs and observations, for Laplace's scale of the prior.
        temperature: of the objective.
        natural: options of natural-gradient optimizers.
        watch: given model and guide, returns options of ``fit``.
    """

    kl_weight: float
    lr: float
    epochs: int
    loader: Iterable[Any]
    validation: tuple[Tensor, Tensor]
    temperature: float = 1.0
    natural: dict[str, Any] = field(default_factory=dict)
    watch: Callable[[Any, Any], dict[str, Any]] = lambda model, guide: {}

    def run(self, model: Any, guide: Any, elbo: Any, optimizer: Any = None) -> tuple[Any, Any]:
        """Train and return model and guide."""
        if optimizer is None:
            schedule = partial(CosineAnnealingLR, T_max=self.epochs)
            optimizer = dvi.optim.Adam(dvi.optim.learning_rates(self.lr), scheduler=schedule)
        loss = elbo(kl_weight=self.kl_weight, temperature=self.temperature)
        svi, options = SVI(model, guide, optimizer, loss=loss), self.watch(model, guide)
        dvi.fit(svi, self.loader, self.epochs, progress=False, **options)
        return model, guide


@dataclass(frozen=True)
class Method:
    """One way to train and predict.

    Attributes:
        train: from a model and a training to the model and its trained guide.
        rule: of prediction; None for the one that the guide was trained for.
        net: changes the network before it becomes Bayesian.
        num_members: of an ensemble of such trainings; 1 for none.
    """

    train: Callable[[Any, Training], tuple[Any, Any]]
    rule: PredictionRule | None = None
    net: Callable[[nn.Sequential], nn.Module] = lambda net: net
    num_members: int = 1

    def fit(self, build: Callable[[], Any], training: Training) -> tuple[Any, Any]:
        """Return a model and its guide, trained anew: a single one, or the mixture of an ensemble.

        Args:
            build: makes the model with an untrained network.
            training: what every method is given.
        """

        def train() -> tuple[Any, Any]:
            return self.train(build(), training)

        if self.num_members == 1:
            return train()
        return dvi.train_ensemble(train, self.num_members, seed=torch.initial_seed(), progress=False)


class SampledDropout(nn.Module):
    """Dropout that is on in prediction, too."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """Drop single elements."""
        return F.dropout(x, self.rate, training=True)


def with_dropout(net: nn.Sequential, rate: float = DROPOUT) -> nn.Sequential:
    """Put dropout before each layer of weights but the first."""
    layers: list[nn.Module] = []
    for layer in net:
        has_weights = isinstance(layer, nn.Linear | nn.Conv2d)
        if has_weights and any(isinstance(earlier, nn.Linear | nn.Conv2d) for earlier in layers):
            layers.append(SampledDropout(rate))
        layers.append(layer)
    return nn.Sequential(*layers)


def _point(model: Any, training: Training) -> tuple[Any, Any]:
    return training.run(model, AutoDelta(model, init_loc_fn=dvi.bayesian.init_to_module), dvi.SampledELBO)


def _sampled(model: Any, training: Training) -> tuple[Any, Any]:
    guide = AutoNormal(model, init_loc_fn=dvi.bayesian.init_to_module, init_scale=0.01)
    return training.run(model, guide, dvi.SampledELBO)


def _taylor(model: Any, training: Training) -> tuple[Any, Any]:
    return training.run(model, dvi.MeanFieldGuide(model), dvi.TaylorELBO)


def _moments(guide: Callable[[Any], Any], model: Any, training: Training) -> tuple[Any, Any]:
    return training.run(model, guide(model), dvi.MomentPropagationELBO)


def _natural(
    optimizer: Callable[[dict], Any],
    model: Any,
    training: Training,
    guide: Callable[[Any], Any] = dvi.NaturalGradientGuide,
) -> tuple[Any, Any]:
    return training.run(model, guide(model), dvi.NaturalGradientELBO, optimizer(training.natural))


def _kronecker(model: Any, training: Training) -> tuple[Any, Any]:
    """A Gaussian over all weights with Kronecker factors, where training ended; the prior's scale by validation."""
    model, guide = training.run(model, dvi.LaplaceGuide(model, kl_weight=training.kl_weight), dvi.TaylorELBO)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DviWarning)  # of modes that are not minima
        guide.fit(training.loader, dvi.laplace.KroneckerFactored(), unconverged="accept")
        criterion = dvi.laplace.ByValidation([training.validation])
        guide.tune(training.loader, criterion=criterion, unconverged="accept", progress=False)
    return model, guide


def _laplace(model: Any, training: Training) -> tuple[Any, Any]:
    """A Gaussian over the last layer, around maximum a posteriori; the prior's scale by validation."""
    model, guide = training.run(model, dvi.LaplaceGuide(model, kl_weight=training.kl_weight), dvi.TaylorELBO)
    *_, last = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    guide.polish(training.loader, subset=f"{last}.*", progress=False)
    guide.fit(training.loader, subset=f"{last}.*")
    guide.tune(training.loader, criterion=dvi.laplace.ByValidation([training.validation]))
    return model, guide


SAMPLED = Samples(NUM_SAMPLES)
METHODS = {
    "MAP": Method(_point, AtMean()),
    "ensemble of 2 MAP": Method(_point, AtMean(), num_members=2),
    "ensemble of 5 MAP": Method(_point, AtMean(), num_members=5),
    "MC dropout": Method(_point, SAMPLED, with_dropout),
    "sampled VI": Method(_sampled, SAMPLED),
    "sampled VI, at the mean": Method(_sampled, AtMean()),
    "VL": Method(_taylor),
    "ensemble of 5 VL": Method(_taylor, num_members=5),
    "MNVI": Method(partial(_moments, dvi.MultiplicativeNoiseGuide)),
    "mean-field moments": Method(partial(_moments, dvi.MeanFieldGuide)),
    "VOGN": Method(partial(_natural, dvi.VOGN), SAMPLED),
    "VOGN, at the mean": Method(partial(_natural, dvi.VOGN), AtMean()),
    "OGN": Method(partial(_natural, dvi.OGN), AtMean()),
    "IVON": Method(partial(_natural, dvi.IVON), SAMPLED),
    "Noisy K-FAC": Method(partial(_natural, dvi.NoisyKFAC, guide=dvi.KroneckerGuide), SAMPLED),
    "Laplace, last layer": Method(_laplace),
    "Laplace, Kronecker": Method(_kronecker),
}
