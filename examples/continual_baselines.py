# SPDX-License-Identifier: Apache-2.0
"""What continual_learning.py compares with: learners that maximise, with and without a memory of earlier tasks."""

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

FINAL_LR = 0.03  # of Adam's first learning rate; it falls by the same factor in every step
PRIOR_WEIGHT = 0.1
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Budget:
    """What every learner is given for each task."""

    epochs: int
    batch_size: int
    lr: float = 3e-3  # of Adam

    def loader(self, data: Pair) -> DataLoader:
        """Shuffled minibatches."""
        return DataLoader(TensorDataset(*data), self.batch_size, shuffle=True)

    def decay(self, num_data: int) -> float:
        """Factor of Adam's learning rate in each step."""
        return FINAL_LR ** (1 / (self.epochs * math.ceil(num_data / self.batch_size)))


class Learner(ABC):
    """Meets tasks one after the other.

    Args:
        network: the network before the first task; it is copied.
        strength: KL weight, or of the penalty; each learner says what it is.
        budget: for each task.
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
    r"""Maximum a posteriori under a quadratic penalty, of which ``strength`` multiplies the information.

    .. math::
        -\sum_i \log p(y_i \mid x_i, \theta) + \tfrac12 \sum_\lambda P_\lambda (\theta_\lambda - \theta^*_\lambda)^2,
        \qquad P \leftarrow P + \mathrm{strength} \cdot F(\theta^*)

    with the solution :math:`\theta^*` of the last task and the diagonal Fisher information F of all its examples; at
    first with zero and the weighted precision of the prior.

    Source: Kirkpatrick et al. (2017), "Overcoming catastrophic forgetting in neural networks"; with one penalty around
    the last solution instead of one for each task, as Huszár (2018) derives it.
    """

    def __init__(self, network: nn.Sequential, strength: float, budget: Budget) -> None:
        super().__init__(network, strength, budget)
        self.parameters = dict(self.network.named_parameters())
        self.centre = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.precision = {
            name: torch.full_like(p, PRIOR_WEIGHT * prior_precision(p)) for name, p in self.parameters.items()
        }

    def learn(self, data: Pair) -> None:
        """Minimise, and measure the information at the minimum."""
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
        """Move the centre to the solution and add the information there."""
        information = fisher(self.network, data[0])
        for name, p in self.parameters.items():
            self.centre[name] = p.detach().clone()
            self.precision[name] += self.strength * information[name]

    @torch.no_grad()
    def probabilities(self, x: Tensor) -> Tensor:
        """Predict with the weights as they are."""
        return self.network(x).softmax(1)


class FineTuning(EWC):
    """Remembers nothing but its weights; ``strength`` has no meaning."""

    def remember(self, data: Pair) -> None:
        """Leave the penalty what it was, the prior."""


class AllData(FineTuning):
    """Keeps the data of all tasks, and trains on with them; ``strength`` has no meaning."""

    def __init__(self, network: nn.Sequential, strength: float, budget: Budget) -> None:
        super().__init__(network, strength, budget)
        self.kept: list[Pair] = []

    def learn(self, data: Pair) -> None:
        """Train on everything so far."""
        self.kept.append(data)
        xs, ys = zip(*self.kept, strict=True)
        super().learn((torch.cat(xs), torch.cat(ys)))


def prior_precision(parameter: Tensor) -> float:
    """Return that of ``fan_in``, variance two over the number of inputs, and 1 for biases."""
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
