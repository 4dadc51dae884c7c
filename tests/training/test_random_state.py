# SPDX-License-Identifier: Apache-2.0
"""Every random generator that training draws from is restored."""

import random

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from pyro_dvi.training.random_state import preserve_random_state, random_state, restore_random_state


def test_every_generator_is_restored():
    generator = torch.Generator()
    loader = DataLoader(TensorDataset(torch.arange(50)), batch_size=50, shuffle=True, generator=generator)

    def draw():
        return [
            random.random(),
            float(np.random.rand()),
            float(torch.rand(())),
            *next(iter(loader))[0].tolist(),
        ]

    np.random.randn()  # leaves a second Gaussian waiting
    state = random_state(loader)
    first = draw()
    second = draw()
    assert first != second
    restore_random_state(state, loader)
    assert draw() == first
    with preserve_random_state(loader):
        draw()
    assert draw() == second
