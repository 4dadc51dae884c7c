# SPDX-License-Identifier: Apache-2.0
"""The example of continual learning, with a budget of two tasks and few epochs."""

import sys

import numpy as np
import pyro
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.examples.scripts import imported


@pytest.fixture(scope="module")
def example():
    with imported("continual_learning") as module:
        yield module


@pytest.mark.slow
def test_it_prints_tables_and_writes_a_plot(example, tmp_path, capsys):
    results = example.main(["--tasks", "2", "--epochs", "6", "--output-dir", str(tmp_path / "new")])
    shown = capsys.readouterr().out
    assert list(results) == ["VOGN", "VCL", "EWC", "fine-tuning", "all data"]
    for name, accuracies in results.items():
        assert name in shown and f"{accuracies[1].mean():.1%}" in shown
        assert accuracies.shape == (2, 2) and np.isnan(accuracies[0, 1])
        assert accuracies[0, 0] > 0.3 and accuracies[1, 1] > 0.3  # chance is 0.1
    assert results["all data"][1, 0] > results["fine-tuning"][1, 0]  # one has the data, the other forgets
    assert (tmp_path / "new" / "continual_learning.png").stat().st_size > 10_000


def test_the_posterior_is_the_next_prior(example):
    task = example.load_images(None, 100, seed=0)
    pyro.set_rng_seed(0)
    learner = example.NaturalGradient(example.make_network(64, 8), 0.1, example.Budget(1, 50))
    learner.learn(task.train)
    first = {name: gaussian for name, gaussian in learner.guide.as_prior().gaussians.items()}
    learner.learn(task.train)
    for name, (loc, scale) in learner.model.priors().items():
        torch.testing.assert_close((loc, scale), first[name])


def test_tasks_are_the_same_images_in_other_orders(example):
    images = example.load_images(None, 100, seed=0)
    first, second = example.permuted(images, 2, seed=0)
    assert torch.equal(first.test[0], images.test[0]) and not torch.equal(second.test[0], images.test[0])
    torch.testing.assert_close(second.test[0].sort(1).values, images.test[0].sort(1).values)
    assert torch.equal(first.test[1], second.test[1])
    parts = (images.train[0], images.validation[0], images.test[0])
    assert sum(map(len, parts)) == 100 + 798 + 899


def test_the_information_is_that_of_single_examples(example):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(7, 3)
    torch.manual_seed(1)
    found = sys.modules["continual_baselines"].fisher(network, x)
    torch.manual_seed(1)
    labels = torch.distributions.Categorical(logits=network(x).detach()).sample()
    for name, p in network.named_parameters():
        squares = sum(
            torch.autograd.grad(F.cross_entropy(network(x[i]), labels[i]), p)[0] ** 2 for i in range(len(x))
        )
        torch.testing.assert_close(found[name], squares)


def test_help_explains(example, capsys):
    with pytest.raises(SystemExit) as stopped:
        example.main(["--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert "--kl-weight" in shown and "as_prior" in shown and "--data-dir" in shown


MISTAKES = [
    (["--tasks", "11"], "--tasks: invalid choice"),
    (["--kl-weight", "-1"], "--kl-weight must be positive"),
    (["--epochs", "0"], "--epochs must be positive"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_a_mistake_on_the_command_line_is_named(example, arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        example.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.cuda
def test_it_runs_on_a_device(example, tmp_path, device):
    options = ["--tasks", "2", "--epochs", "4", "--device", str(device), "--output-dir", str(tmp_path)]
    assert all(accuracies[1, 1] > 0.5 for accuracies in example.main(options).values())
