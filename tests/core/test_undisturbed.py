# SPDX-License-Identifier: Apache-2.0
"""A look at a model leaves statistics and random numbers as they were."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from pyro_dvi.core.undisturbed import evaluating, undisturbed


def test_statistics_and_random_state_come_back_also_after_an_error():
    norm = nn.BatchNorm1d(2)
    state = torch.get_rng_state()
    with pytest.raises(KeyError), undisturbed():
        norm(torch.randn(3, 2) + 5)
        raise KeyError
    assert norm.running_mean is not None and norm.running_mean.abs().max() == 0
    assert norm.num_batches_tracked == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_a_graph_recorded_inside_can_be_differentiated_afterwards():
    norm = nn.BatchNorm1d(2)
    x = torch.randn(3, 2, requires_grad=True)
    with undisturbed():
        loss = norm(x).square().sum()
    norm(x)
    loss.backward()
    assert x.grad is not None


def test_modules_of_another_thread_are_left_alone():
    other = nn.Dropout(0.5)
    with evaluating(), ThreadPoolExecutor(1) as threads:
        threads.submit(other, torch.ones(2)).result()
        assert other.training
