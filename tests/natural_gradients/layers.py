# SPDX-License-Identifier: Apache-2.0
"""Regressions for noisy K-FAC, and what their guides hold."""

from typing import Any

import torch
from pyro.infer import SVI
from torch import Tensor, nn

import pyro_dvi as dvi
from pyro_dvi.natural_gradients import NoisyKFAC

N = 24
NOISE = 0.5


def regression(net: nn.Module, num_data: int, scale: float = 1.0) -> Any:
    """Network with Gaussian noise."""
    return dvi.regressor(dvi.to_bayesian_(net, prior_scale=scale), num_data=num_data, noise_scale=NOISE)


def trained(model: Any, x: Tensor, y: Tensor, steps: int = 5, **options: Any) -> Any:
    """Guide and SVI after some steps."""
    guide = dvi.KroneckerGuide(model)
    svi = SVI(model, guide, NoisyKFAC(options), loss=dvi.NaturalGradientELBO())
    for _ in range(steps):
        svi.step(x, y)
    return guide, svi


def covariance(guide: Any, weight: str) -> Tensor:
    """Covariance of a layer, row by row."""
    rows, columns = guide.roots(weight)
    return torch.kron(rows @ rows.mT, columns @ columns.mT)


def matrix(values: Any, layer: str) -> Tensor:
    """Weights with the bias as the last column."""
    return torch.cat([values[f"{layer}.weight"], values[f"{layer}.bias"].unsqueeze(-1)], -1)


def design(x: Tensor) -> Tensor:
    """Inputs with a column of ones."""
    return torch.cat([x, torch.ones(len(x), 1)], 1)
