# SPDX-License-Identifier: Apache-2.0
"""Every way of training, and a small classifier of pictures that all of them take."""

from collections.abc import Callable
from typing import Any

import pyro
import torch
from pyro.infer import SVI
from torch import Tensor, nn

import pyro_dvi as dvi
from pyro_dvi import curvature
from pyro_dvi.laplace import (
    LaplaceGuide,
)
from pyro_dvi.natural_gradients.ivon import IVON
from pyro_dvi.natural_gradients.updates import OGN, VOGN

NUM_DATA = 12


def small_net(norm: type = nn.BatchNorm2d) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), norm(3), nn.Softplus(), nn.Flatten(), nn.Linear(12, 3))


def images(where: torch.device | str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(NUM_DATA, 1, 4, 4, generator=generator).to(where), torch.arange(
        NUM_DATA, device=where
    ) % 3


def classifier(where: torch.device | str, prior: Any = 1.0, norm: type = nn.BatchNorm2d) -> nn.Module:
    torch.manual_seed(1)
    return dvi.classifier(dvi.to_bayesian_(small_net(norm), prior), num_data=NUM_DATA).to(where)


def taylor(curvature: Any) -> Callable[[Any], SVI]:
    def make(model: Any) -> SVI:
        optimizer = pyro.optim.Adam(dvi.optim.learning_rates(0.01))
        return SVI(model, dvi.MeanFieldGuide(model), optimizer, dvi.TaylorELBO(curvature=curvature))

    return make


def moments(guide: Any) -> Callable[[Any], SVI]:
    return lambda model: SVI(model, guide(model), pyro.optim.Adam({"lr": 0.01}), dvi.MomentPropagationELBO())


def natural(optimizer: Any) -> Callable[[Any], SVI]:
    return lambda model: SVI(
        model, dvi.NaturalGradientGuide(model), optimizer({"lr": 0.05}), dvi.NaturalGradientELBO()
    )


METHODS: dict[str, Callable[[Any], SVI]] = {
    "Taylor, empirical Fisher": taylor(curvature.EmpiricalFisher()),
    "Taylor, Fisher": taylor(curvature.Fisher()),
    "Taylor, Gauss-Newton": taylor(curvature.GGNDiagonal()),
    "Taylor, Hessian": taylor(curvature.HessianDiagonal()),
    "Taylor, minibatch gradient": taylor(curvature.MinibatchGradient()),
    "multiplicative noise": moments(dvi.MultiplicativeNoiseGuide),
    "mean-field moments": moments(dvi.MeanFieldGuide),
    "draws": lambda model: SVI(
        model, dvi.MeanFieldGuide(model), pyro.optim.Adam({"lr": 0.01}), dvi.SampledELBO()
    ),
    "VOGN": natural(VOGN),
    "OGN": natural(OGN),
    "IVON": natural(IVON),
    "NoisyKFAC": lambda model: SVI(
        model, dvi.KroneckerGuide(model), dvi.NoisyKFAC({"lr": 0.05}), dvi.NaturalGradientELBO()
    ),
}


def laplace_guide(where: torch.device | str) -> tuple[LaplaceGuide, list[tuple[Tensor, Tensor]], Any]:
    """At the mode of a linear regression, which a few steps of Newton's method find exactly."""
    model, _, (x, y) = regression(where, dvi.to_bayesian_(nn.Sequential(nn.Linear(2, 1), nn.Flatten(0))))
    guide = LaplaceGuide(model)
    guide.initialize(x, y)
    batches = list(zip(x.split(5), y.split(5), strict=True))
    guide.polish(batches, progress=False)
    return guide, batches, model


def regression(where: torch.device | str, net: Any = None) -> tuple[Any, Any, tuple[Tensor, Tensor]]:
    pyro.clear_param_store()
    torch.manual_seed(0)
    if net is None:
        net = dvi.to_bayesian_(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1), nn.Flatten(0)))
    model = dvi.regressor(net, num_data=NUM_DATA, noise_scale=0.3).to(where)
    x = torch.randn(NUM_DATA, 2, generator=torch.Generator().manual_seed(0))
    return model, dvi.MultiplicativeNoiseGuide(model), (x.to(where), x.sum(1).to(where))
