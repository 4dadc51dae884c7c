# SPDX-License-Identifier: Apache-2.0
"""The methods that mp_quality.py compares: each turns a torch network into a model, a guide, an SVI and a rule."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyro
import torch.nn.functional as F
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoNormal
from torch import Tensor, nn

from pyro_dvi.bayesian import classifier, fan_in, init_to_module, to_bayesian_
from pyro_dvi.elbos import MomentPropagationELBO
from pyro_dvi.guides import MeanFieldGuide, MultiplicativeNoiseGuide
from pyro_dvi.optim import learning_rates
from pyro_dvi.predictive import AtMean, Moments, PredictionRule, Samples

__all__ = ["METHODS", "NUM_SAMPLES", "Method", "Settings", "num_parameters"]

NUM_SAMPLES = 20  # of weights or of dropout masks, for the two methods that predict by sampling


@dataclass(frozen=True)
class Settings:
    """What is tuned on validation images."""

    lr: float
    kl_weight: float
    dropout: float = 0.0


@dataclass(frozen=True)
class Method:
    """One way to train and predict: ``guide_and_svi(model, settings, optimizer)`` and the rule of prediction."""

    guide_and_svi: Callable[[Any, Settings, Any], tuple[Any, SVI]]
    rule: PredictionRule

    def build(self, net: nn.Sequential, settings: Settings, num_data: int) -> tuple[Any, Any, SVI]:
        """Return model, guide and SVI; all methods have the same priors and the same optimizer."""
        if settings.dropout:
            net = with_dropout(net, settings.dropout)
        model = classifier(to_bayesian_(net, prior_scale=fan_in), num_data=num_data)
        optimizer = pyro.optim.Adam(learning_rates(settings.lr, scale_multiplier=10))
        return model, *self.guide_and_svi(model, settings, optimizer)


class KLWeight(poutine.messenger.Messenger):
    """Scale the log-densities of latent sites: the KL weight for Pyro's own ELBOs."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = weight

    def _pyro_sample(self, msg: Any) -> None:
        if not msg["is_observed"]:
            msg["scale"] = msg["scale"] * self.weight


class SampledDropout(nn.Module):
    """Dropout that is on in prediction, too."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """Drop single elements."""
        return F.dropout(x, self.rate, training=True)


def with_dropout(net: nn.Sequential, rate: float) -> nn.Sequential:
    """Put dropout before each layer of weights but the first."""
    layers: list[nn.Module] = []
    for layer in net:
        has_weights = isinstance(layer, nn.Linear | nn.Conv2d)
        if has_weights and any(isinstance(earlier, nn.Linear | nn.Conv2d) for earlier in layers):
            layers.append(SampledDropout(rate))
        layers.append(layer)
    return nn.Sequential(*layers)


def _mnvi(model: Any, settings: Settings, optimizer: Any) -> tuple[Any, SVI]:
    guide = MultiplicativeNoiseGuide(model)
    return guide, SVI(model, guide, optimizer, MomentPropagationELBO(kl_weight=settings.kl_weight))


def _mfvi(model: Any, settings: Settings, optimizer: Any) -> tuple[Any, SVI]:
    guide = MeanFieldGuide(model)
    return guide, SVI(model, guide, optimizer, MomentPropagationELBO(kl_weight=settings.kl_weight))


def _map(model: Any, settings: Settings, optimizer: Any) -> tuple[Any, SVI]:
    guide = AutoDelta(model, init_loc_fn=init_to_module)
    return guide, SVI(KLWeight(settings.kl_weight)(model), guide, optimizer, Trace_ELBO())


def _sampled_vi(model: Any, settings: Settings, optimizer: Any) -> tuple[Any, SVI]:
    guide = AutoNormal(model, init_loc_fn=init_to_module, init_scale=0.01)
    tempered = KLWeight(settings.kl_weight)
    return guide, SVI(tempered(model), KLWeight(settings.kl_weight)(guide), optimizer, Trace_ELBO())


METHODS = {
    "MNVI": Method(_mnvi, Moments()),
    "MFVI": Method(_mfvi, Moments()),
    "deterministic": Method(_map, AtMean()),
    "MC dropout": Method(_map, Samples(NUM_SAMPLES)),
    "sampled VI": Method(_sampled_vi, Samples(NUM_SAMPLES)),
}


def num_parameters(guide: nn.Module) -> int:
    """Count what the optimizer changes."""
    return sum(parameter.numel() for parameter in guide.parameters())
