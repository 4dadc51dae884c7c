# SPDX-License-Identifier: Apache-2.0
"""Four small regressions like those of McInerney & Kallus (2024), their networks, and variances of either sign.

A quadratic and a sine, with inputs that cover an interval or leave a gap in its middle; 50 tanh units. Inputs lie in
[-1, 1], the gap is |x| < 0.4, targets are 2 x^2 - 1 and sin(4 x) with noise of 0.1. Out of distribution is
1 < |x| <= 1.5, or the gap.
"""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.laplace.hessian_free.second_fits import SecondFitsPosterior
from pyro_dvi.laplace import LaplaceGuide, Method
from pyro_dvi.laplace.energy.query import Query

__all__ = ["HIDDEN", "NOISE", "TASKS", "Task", "Training", "measured", "trained"]

NOISE, HIDDEN = 0.1, 50


@dataclass(frozen=True)
class Task:
    """A regression with inputs to learn from, and inputs to predict for."""

    name: str
    sine: bool
    gap: bool

    def mean(self, x: Tensor) -> Tensor:
        """The truth."""
        return (torch.sin(4 * x) if self.sine else 2 * x.square() - 1).squeeze(-1)

    def data(self, generator: torch.Generator, num: int) -> tuple[Tensor, Tensor]:
        """Training data ``[N, 1]`` and ``[N]``."""
        x = 2 * torch.rand(num, 1, generator=generator) - 1
        if self.gap:
            x = x.sign() * (0.4 + 0.6 * x.abs())
        return x, self.mean(x) + NOISE * torch.randn(num, generator=generator)

    def test_inputs(self, num: int = 100) -> tuple[Tensor, Tensor]:
        """Inputs ``[num, 1]`` in order, and whether each is in distribution."""
        x = torch.linspace(-1.0, 1.0, num) if self.gap else torch.linspace(-1.5, 1.5, num)
        inside = x.abs() >= 0.4 if self.gap else x.abs() <= 1
        return x.unsqueeze(-1), inside


TASKS = [
    Task("quadratic, uniform", False, False),
    Task("quadratic, in-between", False, True),
    Task("sine, uniform", True, False),
    Task("sine, in-between", True, True),
]


@dataclass(frozen=True)
class Training:
    """How a MAP is found: options of Adam, and of what it minimises."""

    steps: int
    rate: float
    noise: float = NOISE
    prior_precision: float = 1.0


def trained(x: Tensor, y: Tensor, training: Training) -> nn.Module:
    """The MAP as a network; Adam in NumPy, since so small a network leaves torch little but overhead."""
    net = nn.Sequential(nn.Linear(1, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))
    parameters = list(net.parameters())
    w1, b1, w2, b2 = (p.detach().numpy() for p in parameters)  # views: the network moves with them
    inputs, targets = x.numpy(), y.numpy()
    first = [np.zeros_like(v) for v in (w1, b1, w2, b2)]
    second = [np.zeros_like(v) for v in (w1, b1, w2, b2)]
    for step in range(1, training.steps + 1):
        h = np.tanh(inputs @ w1.T + b1)
        residual = (h @ w2[0] + b2 - targets) / training.noise**2
        back = residual[:, None] * w2 * (1 - h * h)
        of_data = (back.T @ inputs, back.sum(0), (residual @ h)[None], residual.sum())
        for value, data, m, v in zip((w1, b1, w2, b2), of_data, first, second, strict=True):
            g = data + training.prior_precision * value
            m += 0.1 * (g - m)
            v += 0.001 * (g * g - v)
            value -= training.rate * m / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
    return net


def measured(guide: LaplaceGuide, batches: Any, method: Method, x: Tensor) -> tuple[Tensor, int, float]:
    """Variances of either sign at ``x``, the work in gradients of all data, and seconds."""
    energy = guide.energy(batches)
    begin = time.perf_counter()
    posterior = method.fit(energy.at(energy.start), seed=0)
    query = Query(energy.model, (x,), guide.unconstrained_mode(), energy.layout)
    read = posterior.responses if isinstance(posterior, SecondFitsPosterior) else posterior.covariance
    variance = read(query)[:, 0, 0]
    return variance.double().detach(), round(energy.work.done), time.perf_counter() - begin
