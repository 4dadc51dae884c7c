# SPDX-License-Identifier: Apache-2.0
"""Global random generators, of the CPU and of whatever accelerator there is."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal

from pyro_dvi import Samples, predict
from pyro_dvi.core.undisturbed import forked, undisturbed
from pyro_dvi.training.random_state import random_state, restore_random_state


@pytest.mark.parametrize("block", [undisturbed, None])
def test_a_block_uses_up_no_random_numbers_of_the_device(block, device):
    torch.manual_seed(1)
    torch.randn(1, device=device)
    with forked(device) if block is None else block():
        first = torch.randn(3), torch.randn(3, device=device)
    for a, b in zip(first, (torch.randn(3), torch.randn(3, device=device)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_checkpoint_holds_the_generator_of_the_device(device):
    torch.randn(1, device=device)
    state = random_state()
    expected = torch.randn(3, device=device)
    torch.manual_seed(9)
    restore_random_state(state)
    torch.testing.assert_close(torch.randn(3, device=device), expected, rtol=0, atol=0)


def test_a_prediction_with_a_seed_leaves_the_generator_of_the_device(device):
    def model(x, y=None):
        slope = pyro.sample("slope", dist.Normal(x.new_zeros(()), 1.0))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)

    x = torch.ones(3, device=device)
    guide = AutoNormal(model)
    guide(x, x)
    torch.manual_seed(1)
    expected = torch.randn(2, device=device)
    torch.manual_seed(1)
    first, second = (predict(model, guide, (x, x), Samples(4), seed=0).mean for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(torch.randn(2, device=device), expected, rtol=0, atol=0)
