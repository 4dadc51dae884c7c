# SPDX-License-Identifier: Apache-2.0
"""Baselines for continual_learning.py: point estimates, with and without a memory of earlier tasks."""

import copy
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, TensorDataset

__all__ = ["EWC", "AllData", "Budget", "FineTuning", "Learner", "Pair"]

FINAL_LR = 0.03  # Adam's final learning rate relative to its first; the decay is exponential
PRIOR_WEIGHT = 0.1
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Budget:
    """Training budget of every learner for each task."""

    epochs: int
    batch_size: int
    lr: float = 3e-3  # of Adam

    def loader(self, data: Pair) -> DataLoader:
        """Shuffled minibatches."""
        return DataLoader(TensorDataset(*data), self.batch_size, shuffle=True)

    def decay(self, num_data: int) -> float:
        """Factor by which Adam's learning rate decays in each step."""
        return FINAL_LR ** (1 / (self.epochs * math.ceil(num_data / self.batch_size)))


class Learner(ABC):
    """Learns tasks one after the other.

    Args:
        network: the network before the first task; it is copied.
        strength: weight of the KL divergence or of the penalty; see each learner.
        budget: training budget for each task.
    """

    def __init__(self, network: nn.Sequential, strength: float, budget: Budget) -> None:
        self.network, self.strength, self.budget = copy.deepcopy(network), strength, budget

    @abstractmethod
    def learn(self, data: Pair) -> None:
        """Learn the next task."""

    @abstractmethod
    def probabilities(self, x: Tensor) -> Tensor:
        """Return class probabilities ``[n, 10]``."""


class EWC(Learner):
    r"""Maximum a posteriori with a quadratic penalty, in which ``strength`` multiplies the Fisher information.

    .. math::
        -\sum_i \log p(y_i \mid x_i, \theta) + \tfrac12 \sum_\lambda P_\lambda (\theta_\lambda - \theta^*_\lambda)^2,
        \qquad P \leftarrow P + \mathrm{strength} \cdot F(\theta^*)

    with the solution :math:`\theta^*` of the last task and the diagonal Fisher information F, summed over its examples.
    Before the first task, :math:`\theta^* = 0` and P is the weighted precision of the prior.

    Source: Kirkpatrick et al. (2017), "Overcoming catastrophic forgetting in neural networks"; with a single penalty
    around the last solution instead of one for each task, as derived by Huszár (2018).
    """

    def __init__(self, network: nn.Sequential, strength: float, budget: Budget) -> None:
        super().__init__(network, strength, budget)
        self.parameters = dict(self.network.named_parameters())
        self.centre = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.precision = {
            name: torch.full_like(p, PRIOR_WEIGHT * prior_precision(p)) for name, p in self.parameters.items()
        }

    def learn(self, data: Pair) -> None:
        """Minimise the penalised loss, and compute the Fisher information at the minimum."""
        adam = torch.optim.Adam(self.network.parameters(), self.budget.lr)
        decay = torch.optim.lr_scheduler.ExponentialLR(adam, self.budget.decay(len(data[0])))
        for _ in range(self.budget.epochs):
            for x, y in self.budget.loader(data):
                adam.zero_grad()
                loss = F.cross_entropy(self.network(x), y) + self.penalty() / len(data[0])
                loss.backward()
                adam.step()
                decay.step()
        self.remember(data)

    def penalty(self) -> Tensor:
        """Return the quadratic penalty."""
        terms = [
            (self.precision[name] * (p - self.centre[name]).square()).sum()
            for name, p in self.parameters.items()
        ]
        return 0.5 * torch.stack(terms).sum()

    def remember(self, data: Pair) -> None:
        """Move the centre of the penalty to the solution and add the Fisher information there."""
        information = fisher(self.network, data[0])
        for name, p in self.parameters.items():
            self.centre[name] = p.detach().clone()
            self.precision[name] += self.strength * information[name]

    @torch.no_grad()
    def probabilities(self, x: Tensor) -> Tensor:
        """Predict with the current weights."""
        return self.network(x).softmax(1)


class FineTuning(EWC):
    """Continues from the weights of the last task, without a penalty; ``strength`` is not used."""

    def remember(self, data: Pair) -> None:
        """Leave the penalty unchanged: it is the prior."""


class AllData(FineTuning):
    """Keeps the data of all tasks and trains on all of them; ``strength`` is not used."""

    def __init__(self, network: nn.Sequential, strength: float, budget: Budget) -> None:
        super().__init__(network, strength, budget)
        self.kept: list[Pair] = []

    def learn(self, data: Pair) -> None:
        """Train on the data of all tasks so far."""
        self.kept.append(data)
        xs, ys = zip(*self.kept, strict=True)
        super().learn((torch.cat(xs), torch.cat(ys)))


def prior_precision(parameter: Tensor) -> float:
    """Return the precision of ``fan_in``: half the number of inputs for weights, 1 for biases."""
    return parameter.shape[1] / 2 if parameter.dim() > 1 else 1.0


def fisher(network: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return the diagonal Fisher information summed over the rows of ``x``, with labels drawn from the network."""
    parameters = {name: p.detach() for name, p in network.named_parameters()}
    with torch.no_grad():
        labels = torch.distributions.Categorical(logits=network(x)).sample()

    def loss(parameters: dict[str, Tensor], row: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(network, parameters, (row,)), label)

    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for rows, drawn in zip(x.split(250), labels.split(250), strict=True):
        gradients = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, rows, drawn)
        for name, gradient in gradients.items():
            total[name] += gradient.square().sum(0)
    return total
