# SPDX-License-Identifier: Apache-2.0
"""Contestants from elsewhere: the choice among candidates, and mixtures of their predictives."""

import torch
from torch.distributions import Categorical, Distribution, MixtureSameFamily, Normal

from benchmarks.shared.networks import mlp
from benchmarks.shared.peers import PEERS, Peer, Problem, averaged, choose
from benchmarks.shared.tasks import Data, Task


def tiny(classes: bool) -> Problem:
    x = torch.linspace(-1, 1, 24)[:, None]
    y = (x[:, 0] > 0).long() if classes else 2 * x[:, 0]
    task = Task(lambda: mlp((1, 8, 1 + classes)), lambda *_: data, (0.1, 0.3), 30, 8, 5e-2, classes)
    data = Data((x, y), (x, y), (x, y))
    return Problem(task, data)


def test_the_candidate_of_the_lowest_validation_nll_is_chosen_and_one_that_diverged_is_not() -> None:
    def predict_with(scale: float) -> Distribution:
        return Normal(2 * torch.linspace(-1, 1, 24), scale)

    scales = {0.1: float("nan"), 0.3: 0.5}
    peer = Peer(lambda problem, kl_weight: lambda x: predict_with(scales[kl_weight]))
    chosen = choose(peer, tiny(classes=False), seed=0)
    assert chosen.options == {"kl_weight": 0.3}
    expected = 0.5 * torch.log(torch.tensor(2 * torch.pi * 0.25))
    torch.testing.assert_close(torch.tensor(chosen.validation_nll), expected)


def test_ensembles_average_densities() -> None:
    members = [
        MixtureSameFamily(Categorical(torch.ones(3, 1)), Normal(torch.full((3, 1), loc), scale))
        for loc, scale in ((0.0, 1.0), (2.0, 0.5))
    ]
    y = torch.tensor([0.0, 1.0, 3.0])
    densities = [Normal(0.0, 1.0).log_prob(y).exp(), Normal(2.0, 0.5).log_prob(y).exp()]
    torch.testing.assert_close(averaged(members).log_prob(y), torch.stack(densities).mean(0).log())


def test_maximum_a_posteriori_learns_classes_and_numbers() -> None:
    for classes, guessing in (
        (True, 0.69),
        (False, 1.6),
    ):  # NLL of the frequencies, and of one Normal for all
        chosen = choose(PEERS["MAP, plain torch"], tiny(classes), seed=0)
        assert chosen.validation_nll < guessing - 0.4
