# SPDX-License-Identifier: Apache-2.0
"""The methods that vogn_quality.py compares: each turns a model into a guide, an SVI and rules of prediction."""

from collections.abc import Callable
from dataclasses import dataclass
from math import cos, pi
from typing import Any

import pyro
import torch
import torch.nn.functional as F
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoNormal
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from benchmarks.mp_methods import KLWeight, with_dropout
from pyro_dvi.bayesian import init_to_module
from pyro_dvi.divergences import kl_to_priors
from pyro_dvi.elbos import NaturalGradientELBO
from pyro_dvi.elbos.base import DeterministicELBO
from pyro_dvi.guides import MeanFieldGuide, NaturalGradientGuide
from pyro_dvi.handlers.means import PosteriorMeans
from pyro_dvi.handlers.posterior_run import Call, PosteriorRun
from pyro_dvi.optim import IVON, OGN, VOGN, learning_rates
from pyro_dvi.predictive import AtMean, PredictionRule, Samples

__all__ = ["METHODS", "NUM_SAMPLES", "Method"]

NUM_SAMPLES = 10
DROPOUT = 0.1
MEAN, SAMPLED = {"mean": AtMean()}, {"sampled": Samples(NUM_SAMPLES)}


@dataclass(frozen=True)
class Training:
    """What every method is given.

    Attributes:
        temperature: weight of the KL divergence, or of the log-prior.
        lr: step size of Adam.
        epochs: length of training.
    """

    temperature: float
    lr: float
    epochs: int

    def adam(self) -> Any:
        """Adam whose step size falls to zero as a cosine; posterior scales have ten times that of the means."""
        rates = learning_rates(self.lr, scale_multiplier=10)
        return pyro.optim.PyroLRScheduler(
            torch.optim.lr_scheduler.LambdaLR,
            {
                "optimizer": torch.optim.Adam,
                "optim_args": rates,
                "lr_lambda": lambda epoch: 0.5 * (1 + cos(pi * epoch / self.epochs)),
            },
        )


@dataclass(frozen=True)
class Method:
    """One way to train and predict.

    Attributes:
        build: makes guide and SVI of a model.
        rules: of prediction, by name; the last is the one that it is meant for.
        relative: the method whose temperature it takes; None if it is tuned itself.
        net: changes the network before it becomes Bayesian.
        stops_early: whether the best epoch on validation data counts instead of the last.
    """

    build: Callable[[Any, Training], tuple[Any, SVI]]
    rules: dict[str, PredictionRule]
    relative: str | None = None
    net: Callable[[nn.Sequential], nn.Sequential] = lambda net: net
    stops_early: bool = False


def _map(model: Any, training: Training) -> tuple[Any, SVI]:
    guide = AutoDelta(model, init_loc_fn=init_to_module)
    return guide, SVI(KLWeight(training.temperature)(model), guide, training.adam(), Trace_ELBO())


def _bbb(model: Any, training: Training) -> tuple[Any, SVI]:
    guide = AutoNormal(model, init_loc_fn=init_to_module, init_scale=0.01)
    tempered = KLWeight(training.temperature)
    return guide, SVI(tempered(model), KLWeight(training.temperature)(guide), training.adam(), Trace_ELBO())


def _local(model: Any, training: Training) -> tuple[Any, SVI]:
    guide = MeanFieldGuide(model)
    return guide, SVI(model, guide, training.adam(), LocalReparametrisation(kl_weight=training.temperature))


def _natural(optimizer: Callable) -> Callable[[Any, Training], tuple[Any, SVI]]:
    def build(model: Any, training: Training) -> tuple[Any, SVI]:
        guide = NaturalGradientGuide(model)
        return guide, SVI(model, guide, optimizer({}), NaturalGradientELBO(kl_weight=training.temperature))

    return build


class LocalReparametrisation(DeterministicELBO):
    r"""ELBO of a mean-field posterior with noise on the outputs of layers instead of on weights.

    .. math::
        h \sim \mathcal N\bigl(x \mu^\top, x^2 (\sigma^2)^\top\bigr)

    Status: unbiased for linear layers. Outputs of a convolution share their weights, but get noise of their own.

    Source: Kingma, Salimans & Welling (2015), "Variational dropout and the local reparameterization trick".
    """

    def _evaluate(self, call: Call, kl_weight: float, training: bool) -> dict[str, Tensor]:
        run = PosteriorRun.of(call, PosteriorMeans(), _NoisyLayers)
        log_likelihood = self._observed(run.model_trace).log_likelihood()
        kl = kl_to_priors(run.latents)
        return {"loss": kl_weight * kl - log_likelihood, "log_likelihood": log_likelihood, "kl": kl}


class _NoisyLayers(TorchFunctionMode):
    """Sample what linear layers and convolutions return, given their weights at the mean."""

    def __init__(self, means: PosteriorMeans) -> None:
        super().__init__()
        self.variances = {id(g.value): g.scale.square() for g in means.gaussians.values()}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = function(*args, **kwargs)
        if function not in (F.linear, F.conv2d) or id(args[1]) not in self.variances:
            return output
        x, weight, bias, *rest = args
        bias = self.variances.get(id(bias)) if bias is not None else None
        variance = function(x.square(), self.variances[id(weight)], bias, *rest, **kwargs)
        return output + (variance + 1e-16).sqrt() * torch.randn_like(output)


METHODS = {
    "MAP": Method(_map, MEAN),
    "BBB": Method(_bbb, MEAN | SAMPLED),
    "VOGN": Method(_natural(VOGN), MEAN | SAMPLED),
    "OGN": Method(_natural(OGN), MEAN | SAMPLED, "VOGN"),
    "IVON": Method(_natural(IVON), MEAN | SAMPLED, "VOGN"),
    "MAP, stopped early": Method(_map, MEAN, "MAP", stops_early=True),
    "local reparametrisation": Method(_local, MEAN | SAMPLED, "BBB"),
    "MC dropout": Method(_map, SAMPLED, "MAP", lambda net: with_dropout(net, DROPOUT)),
}
