# SPDX-License-Identifier: Apache-2.0
"""Models at their modes, whose Gaussians are known or can be computed densely."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_dvi.laplace import LaplaceGuide

Batches = list[tuple[Tensor, ...]]


def ragged(x: Tensor, y: Tensor, size: int = 5) -> Batches:
    """Minibatches, the last one shorter."""
    return list(zip(x.split(size), y.split(size), strict=True))


@dataclass
class LinearRegression:
    """y = x w + noise with w ~ N(0, scale^2), where posterior and evidence are closed forms."""

    num_data: int = 13
    num_features: int = 3
    prior_scale: float = 0.7
    noise: float = 0.5
    x: Tensor = field(init=False)
    y: Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(11)
        self.x = torch.randn(self.num_data, self.num_features, dtype=torch.float64, generator=generator)
        weight = torch.linspace(-1, 1, self.num_features, dtype=torch.float64)
        noise = torch.randn(self.num_data, dtype=torch.float64, generator=generator)
        self.y = self.x @ weight + self.noise * noise

    @property
    def batches(self) -> Batches:
        return ragged(self.x, self.y)

    def model(self, x: Tensor, y: Tensor | None = None) -> Any:
        prior = dist.Normal(x.new_zeros(()), self.prior_scale).expand([x.shape[1]]).to_event(1)
        weight = pyro.sample("weight", prior)
        with pyro.plate("data", self.num_data, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(x @ weight, self.noise), obs=y)

    def precision(self) -> Tensor:
        eye = torch.eye(self.num_features, dtype=torch.float64)
        return self.x.T @ self.x / self.noise**2 + eye / self.prior_scale**2

    def mode(self) -> Tensor:
        return torch.linalg.solve(self.precision(), self.x.T @ self.y / self.noise**2)

    def log_evidence(self) -> float:
        covariance = self.prior_scale**2 * self.x @ self.x.T + self.noise**2 * torch.eye(
            self.num_data, dtype=torch.float64
        )
        zero = torch.zeros(self.num_data, dtype=torch.float64)
        return float(dist.MultivariateNormal(zero, covariance).log_prob(self.y))

    def guide(self) -> LaplaceGuide:
        """A guide at the mode."""
        return guide_at(self.model, self.batches[0], {"weight": self.mode()})


def guide_at(model: Callable, arguments: tuple, locs: dict[str, Tensor], **options: Any) -> LaplaceGuide:
    """A guide whose unconstrained mode is given."""
    guide = LaplaceGuide(model, **options)
    guide.initialize(*arguments)
    with torch.no_grad():
        for name, loc in locs.items():
            getattr(guide.locs, name).copy_(loc)
    return guide


@dataclass
class SineRegression:
    """One hidden layer of tanh units on noisy sines, as in the paper on Hessian-free Laplace; functional model."""

    hidden: int = 10
    num_data: int = 23
    noise: float = 0.3
    prior_scale: float = 1.0
    dtype: torch.dtype = torch.float64
    x: Tensor = field(init=False)
    y: Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        x = 8 * torch.rand(self.num_data, 1, dtype=torch.float64, generator=generator) - 4
        noise = torch.randn(self.num_data, dtype=torch.float64, generator=generator)
        y = x[:, 0].sin() + self.noise * noise
        self.x, self.y = x.to(self.dtype), y.to(self.dtype)

    @property
    def batches(self) -> Batches:
        return ragged(self.x, self.y, 10)

    def model(self, x: Tensor, y: Tensor | None = None) -> Any:
        def site(name: str, *shape: int) -> Tensor:
            prior = dist.Normal(x.new_zeros(()), self.prior_scale).expand(shape).to_event(len(shape))
            return pyro.sample(name, prior)

        h = torch.tanh(x @ site("w1", 1, self.hidden) + site("b1", self.hidden))
        f = h @ site("w2", self.hidden) / math.sqrt(self.hidden) + site("b2")
        with pyro.plate("data", self.num_data, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(f, self.noise), obs=y)

    def trained(
        self, steps: int = 200, rate: float = 0.05, kl_weight: float = 1.0, **options: Any
    ) -> LaplaceGuide:
        """A guide after some steps of Adam on all data."""
        generator = torch.Generator().manual_seed(3)
        shapes = {"w1": (1, self.hidden), "b1": (self.hidden,), "w2": (self.hidden,), "b2": ()}
        start = {n: torch.randn(s, dtype=torch.float64, generator=generator) for n, s in shapes.items()}
        locs = {n: v.to(self.dtype).requires_grad_() for n, v in start.items()}
        optimizer = torch.optim.Adam(locs.values(), lr=rate)
        for _ in range(steps):
            optimizer.zero_grad()
            self.loss(locs, kl_weight).backward()
            optimizer.step()
        return guide_at(self.model, (self.x, self.y), locs, **options)

    def loss(self, locs: dict[str, Tensor], kl_weight: float) -> Tensor:
        """The objective of training up to a constant, without Pyro."""
        h = torch.tanh(self.x @ locs["w1"] + locs["b1"])
        f = h @ locs["w2"] / math.sqrt(self.hidden) + locs["b2"]
        squares = torch.stack([v.square().sum() for v in locs.values()]).sum()
        return (
            0.5 * ((self.y - f) / self.noise).square().sum() + 0.5 * kl_weight * squares / self.prior_scale**2
        )
