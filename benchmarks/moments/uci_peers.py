# SPDX-License-Identifier: Apache-2.0
"""Peers without a posterior over weights, in plain torch: maximum a posteriori, and Monte Carlo dropout."""

from math import log

import torch
from torch import Tensor
from torch.distributions import Normal

from benchmarks.moments.uci_methods import DRAWS, Method
from benchmarks.moments.uci_network import Networks
from benchmarks.shared.regressions import Minibatch, Rows, TrainingSets

SITES = ("hidden", "mean", "noise")


class PointNetworks:
    """The networks of :class:`~benchmarks.moments.uci_network.Networks` with certain weights.

    Args:
        data: training sets.
        seed: of the initial weights.
        decay: precision of the Normal prior, of each network.
        dropout: probability of dropping a hidden unit, of each network; None for none.
    """

    def __init__(self, data: TrainingSets, seed: int, decay: Tensor, dropout: Tensor | None) -> None:
        self.data, self.decay = data, decay
        self.dropout = None if dropout is None else dropout[:, None, None]
        twin = Networks(data.x.shape[-1], data.sizes)
        self.weights = {site: w.requires_grad_() for site, w in twin.initial_weights(seed).items()}
        self.biases = {site: getattr(twin, f"{site}_bias") for site in SITES}

    def parameters(self) -> list[Tensor]:
        """Weights and biases."""
        return [*self.weights.values(), *self.biases.values()]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-variance ``[m, K]`` at ``[m, K, d]``."""
        units = torch.baddbmm(self.biases["hidden"], x.transpose(0, 1), self.weights["hidden"]).relu()
        if self.dropout is not None:
            units = units * (torch.rand_like(units) >= self.dropout) / (1 - self.dropout)
        mean, log_variance = (
            torch.baddbmm(self.biases[site], units, self.weights[site]).squeeze(-1).t() for site in SITES[1:]
        )
        return mean, log_variance

    def loss(self, batch: Minibatch, exponent: float) -> Tensor:
        """Negative log joint density, with observations weighted by a power of the noise variance."""
        mean, log_variance = self.forward(batch.x)
        errors = 0.5 * (log_variance + (mean - batch.y).square() * (-log_variance).exp())
        if exponent:
            errors = errors * (exponent * log_variance.detach()).softmax(0) * len(batch.x)
        squares = sum(weight.square().sum((1, 2)) for weight in self.weights.values())
        return (errors.mean(0) * self.data.sizes + 0.5 * self.decay * squares).sum()

    @torch.no_grad()
    def score(self, rows: list[Rows], num_draws: int) -> tuple[Tensor, Tensor, Tensor]:
        """As :meth:`Fitted.score`, with draws of dropout masks."""
        examples, valid = self.data.examples(rows)
        densities, means = [], []
        for _ in range(num_draws):
            mean, log_variance = self.forward(examples.x)
            densities.append(Normal(mean, (0.5 * log_variance).exp()).log_prob(examples.y))
            means.append(mean)
        density = torch.stack(densities).double().logsumexp(0) - log(num_draws) - self.data.y_scale.log()
        mean = torch.stack(means).double().mean(0) * self.data.y_scale + self.data.y_mean
        return density, mean, valid


class MAP(Method):
    """Maximum a posteriori: weight decay is the precision of a Normal prior."""

    name = "MAP"
    tuned = "weight decay"
    candidates = (0.1, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
    rule = 1
    members = 5

    def networks(self, data: TrainingSets, values: Tensor, seed: int) -> PointNetworks:
        """Return networks with the hyper-parameter at ``values``."""
        return PointNetworks(data, seed, decay=values, dropout=None)

    def fit(self, data: TrainingSets, batch_size: int, values: Tensor, seed: int) -> PointNetworks:
        torch.manual_seed(seed)
        networks = self.networks(data, values, seed)
        weighting = self.recipe.weighting().exponent
        assert callable(weighting)
        step = 0

        def loss(batch: Minibatch) -> Tensor:
            nonlocal step
            step += 1
            return networks.loss(batch, weighting(step - 1))

        self.recipe.train(networks.parameters(), loss, data.minibatches(batch_size, seed))
        return networks


class Dropout(MAP):
    """Monte Carlo dropout of hidden units, with weight decay 1."""

    name = "MC dropout"
    tuned = "dropout rate"
    candidates = (0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6)
    rule = DRAWS
    members = 1

    def networks(self, data: TrainingSets, values: Tensor, seed: int) -> PointNetworks:
        return PointNetworks(data, seed, decay=torch.ones(()), dropout=values)
