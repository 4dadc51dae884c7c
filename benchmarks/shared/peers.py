# SPDX-License-Identifier: Apache-2.0
"""Other ways to predictions with uncertainty, each in plain torch or from its own package, trained as that says.

All have the network, the data, the epochs and the prior of ``to_bayesian_(net, prior_scale=fan_in)`` in common. The
weight of the prior against the data, ``kl_weight``, is one of the task's temperatures, chosen on validation data.
Packages of the extra ``bench`` are imported when they are run.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, MixtureSameFamily, Normal
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.shared.methods import with_dropout
from benchmarks.shared.tasks import Data, Task

__all__ = ["PEERS", "Chosen", "Peer", "Problem", "averaged", "choose"]

NUM_DRAWS, NUM_MEMBERS, GRID, DROPOUT = 30, 5, 13, (0.01, 0.05, 0.2)
# Curvature at the start is the package's default. Its memory of 1e5 steps is longer than any training here.
IVON_RATES, IVON_CURVATURE, IVON_BETA2 = (0.03, 0.1, 0.3), 1.0, 0.999
WEIGHTED = (nn.Linear, nn.Conv2d)
Predict = Callable[[Tensor], Distribution]  # from inputs to one distribution for each row


@dataclass(frozen=True)
class Problem:
    """A task with the data of a seed; networks have no noise scale of their own, it is learned beside them."""

    task: Task
    data: Data

    def loader(self, shuffle: bool = True) -> DataLoader:
        """Batches of training data, of targets ``[batch, 1]`` in regressions."""
        return DataLoader(
            TensorDataset(*self.columns(self.data.train)), self.task.batch_size, shuffle=shuffle
        )

    def columns(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return inputs and labels, or inputs and targets ``[n, 1]``."""
        x, y = pair
        return x, y if self.task.classes else y[:, None]


@dataclass(frozen=True)
class Peer:
    """A way to predictions.

    Attributes:
        train: from a problem and the options of a candidate to the predictive distribution.
        rates: of dropout, or step sizes, that are tried with every KL weight.
        tunes_itself: whether it takes no options, since it chooses on the validation data by itself.
    """

    train: Callable[..., Predict]
    rates: tuple[float, ...] = ()
    tunes_itself: bool = False

    def candidates(self, problem: Problem) -> list[dict[str, float]]:
        """Return the options that are tried."""
        if self.tunes_itself:
            return [{}]
        if not self.rates:
            return [{"kl_weight": weight} for weight in problem.task.temperatures]
        return [
            {"kl_weight": weight, "rate": rate} for weight in problem.task.temperatures for rate in self.rates
        ]


@dataclass(frozen=True)
class Chosen:
    """A candidate that was trained, and its mean validation NLL, of standardised targets in regressions."""

    predict: Predict
    options: dict[str, float]
    validation_nll: float


def choose(peer: Peer, problem: Problem, seed: int) -> Chosen:
    """Train with every candidate, and return the one of the lowest validation NLL."""
    x, y = problem.data.validation
    tried: list[Chosen] = []
    for options in peer.candidates(problem):
        torch.manual_seed(seed)
        try:
            predict = peer.train(problem, **options)
            tried.append(Chosen(predict, options, -float(predict(x).log_prob(y).mean())))
        except ValueError:  # of a distribution with NaN: this candidate has diverged
            continue
    return min(tried, key=lambda chosen: chosen.validation_nll)


class Likelihood(nn.Module):
    """A network with its likelihood: classes, or numbers with a learned scale of their noise."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.net, self.classes = problem.task.network(), problem.task.classes
        self.log_noise = nn.Parameter(torch.tensor(0.3).log(), requires_grad=not problem.task.classes)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean negative log-likelihood of a batch."""
        out = self.net(x)
        return (
            F.cross_entropy(out, y) if self.classes else -Normal(out, self.log_noise.exp()).log_prob(y).mean()
        )

    @torch.no_grad()
    def mixture(self, outputs: Tensor) -> Distribution:
        """Average the predictives of outputs ``[K, n, ...]``."""
        if self.classes:
            return Categorical(probs=outputs.softmax(-1).mean(0))
        means = outputs.squeeze(-1).T
        return MixtureSameFamily(Categorical(torch.ones_like(means)), Normal(means, self.log_noise.exp()))


def prior_precisions(net: nn.Module) -> dict[nn.Parameter, float]:
    """The precision of the prior of each weight and bias of layers, as ``fan_in`` has it; 0 of others, as of norms."""
    precisions = dict.fromkeys(net.parameters(), 0.0)
    for layer in net.modules():
        if isinstance(layer, WEIGHTED):
            precisions[layer.weight] = prod(layer.weight.shape[1:]) / 2
            if layer.bias is not None:
                precisions[layer.bias] = 1.0
    return precisions


def _trained(problem: Problem, model: Likelihood, kl_weight: float) -> Likelihood:
    """Train to the maximum of the posterior by Adam with a cosine decay."""
    precisions = prior_precisions(model.net)
    optimizer = torch.optim.Adam(model.parameters(), problem.task.adam_lr)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, problem.task.epochs)
    for _ in range(problem.task.epochs):
        for x, y in problem.loader():
            optimizer.zero_grad()
            squares = sum(precision * w.square().sum() for w, precision in precisions.items())
            (model.loss(x, y) + 0.5 * kl_weight / len(problem.data.train[0]) * squares).backward()
            optimizer.step()
        decay.step()
    return model.eval()


def _map(problem: Problem, kl_weight: float) -> Predict:
    """One network at its maximum a posteriori."""
    return _ensemble(problem, kl_weight, members=1)


def _ensemble(problem: Problem, kl_weight: float, members: int = NUM_MEMBERS) -> Predict:
    """Networks of the same training from different initial weights and orders of batches."""
    models = [_trained(problem, Likelihood(problem), kl_weight) for _ in range(members)]

    @torch.no_grad()
    def predict(x: Tensor) -> Distribution:
        return averaged([model.mixture(model.net(x)[None]) for model in models])

    return predict


def averaged(members: list[Distribution]) -> Distribution:
    """The mixture of predictives: of classes, or of mixtures of Normals."""
    if isinstance(members[0], Categorical):
        return Categorical(probs=torch.stack([member.probs for member in members]).mean(0))
    parts: list[Any] = [member.component_distribution for member in members]  # type: ignore[attr-defined]
    means = torch.cat([part.loc for part in parts], -1)
    scales = torch.cat([part.scale for part in parts], -1)
    return MixtureSameFamily(Categorical(torch.ones_like(means)), Normal(means, scales))


def _dropout(problem: Problem, kl_weight: float, rate: float) -> Predict:
    """Dropout before every layer of weights but the first, on when predicting (Gal & Ghahramani 2016)."""
    model = Likelihood(problem)
    model.net = with_dropout(model.net, rate)
    _trained(problem, model, kl_weight)

    @torch.no_grad()
    def predict(x: Tensor) -> Distribution:
        return model.mixture(torch.stack([model.net(x) for _ in range(NUM_DRAWS)]))

    return predict


def _ivon(problem: Problem, kl_weight: float, rate: float) -> Predict:
    """The optimizer of ``ivon-opt`` (Shen et al. 2024), with one draw a step and averaged predictions of draws.

    The prior enters as weight decay, its weight as the effective sample size. A noise scale is trained by Adam.
    """
    import ivon

    model = Likelihood(problem)
    count = len(problem.data.train[0])
    groups = [
        {"params": [w], "weight_decay": kl_weight * precision / count}
        for w, precision in prior_precisions(model.net).items()
    ]
    optimizer = ivon.IVON(groups, lr=rate, ess=count / kl_weight, hess_init=IVON_CURVATURE, beta2=IVON_BETA2)
    noise = torch.optim.Adam([model.log_noise], problem.task.adam_lr)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, problem.task.epochs)
    for _ in range(problem.task.epochs):
        for x, y in problem.loader():
            with optimizer.sampled_params(train=True):
                optimizer.zero_grad()
                noise.zero_grad()
                model.loss(x, y).backward()
            optimizer.step()
            noise.step()
        decay.step()
    model.eval()

    @torch.no_grad()
    def predict(x: Tensor) -> Distribution:
        outputs = []
        for _ in range(NUM_DRAWS):
            with optimizer.sampled_params():
                outputs.append(model.net(x))
        return model.mixture(torch.stack(outputs))

    return predict


def _laplace(problem: Problem, subset: str, criterion: str) -> Predict:
    """Kronecker factors of ``laplace-torch`` (Daxberger et al. 2021) around the maximum a posteriori chosen before."""
    from laplace import Laplace

    kl_weight = choose(Peer(_map), problem, torch.initial_seed()).options["kl_weight"]
    model = _trained(problem, Likelihood(problem), kl_weight)
    noise = {} if problem.task.classes else {"sigma_noise": float(model.log_noise.detach().exp())}
    kind = "classification" if problem.task.classes else "regression"
    found: Any = Laplace(deepcopy(model.net), kind, subset, "kron", **noise)
    found.fit(problem.loader(shuffle=False))
    if criterion == "evidence":
        found.optimize_prior_precision(method="marglik", pred_type="glm")
    else:
        pairs = TensorDataset(*problem.columns(problem.data.validation))
        validation = DataLoader(pairs, problem.task.batch_size)

        def loss(mean: Tensor, *rest: Tensor) -> Tensor:
            """Mean NLL of probabilities or of means and variances; the default loss is never reset on the way."""
            y = rest[-1]
            if problem.task.classes:
                return F.nll_loss(mean.log(), y)
            spread = (rest[0].reshape(y.shape) + float(found.sigma_noise) ** 2).sqrt()
            return -Normal(mean.reshape(y.shape), spread).log_prob(y).mean()

        found.optimize_prior_precision(
            method="gridsearch",
            pred_type="glm",
            link_approx="probit",
            val_loader=validation,
            grid_size=GRID,
            loss=loss,
        )

    def predict(x: Tensor) -> Distribution:
        if problem.task.classes:
            return Categorical(probs=found(x, pred_type="glm", link_approx="probit").detach())
        mean, variance = (value.detach().reshape(len(x)) for value in found(x, pred_type="glm"))
        return Normal(mean, (variance + float(found.sigma_noise) ** 2).sqrt())

    return predict


PEERS = {
    "MAP, plain torch": Peer(_map),
    "ensemble of five, plain torch": Peer(_ensemble),
    "MC dropout": Peer(_dropout, rates=DROPOUT),
    "ivon-opt": Peer(_ivon, rates=IVON_RATES),
    **{
        f"laplace-torch, {layers}, {criterion}": Peer(
            partial(_laplace, subset=subset, criterion=criterion), tunes_itself=True
        )
        for layers, subset in (("last layer", "last_layer"), ("all layers", "all"))
        for criterion in ("validation", "evidence")
    },
}
