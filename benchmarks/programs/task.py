# SPDX-License-Identifier: Apache-2.0
"""The task of every program in this folder: three classes of points, a network, and loaders."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = int(os.environ.get("EPOCHS", "60"))
NUM_DATA = 200


def points(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of the plane and their labels."""
    labels = torch.randint(3, (count,))
    centres = torch.tensor([[0.0, 1.0], [0.9, -0.5], [-0.9, -0.5]])
    return centres[labels] + 0.6 * torch.randn(count, 2), labels


torch.manual_seed(0)
train, held_out, test = points(NUM_DATA), points(100), points(500)
loader = DataLoader(TensorDataset(*train), batch_size=50, shuffle=True)
validation = DataLoader(TensorDataset(*held_out), batch_size=100)
test_loader = DataLoader(TensorDataset(*test), batch_size=500)
train_arrays, test_arrays = ([tensor.numpy() for tensor in pair] for pair in (train, test))
net = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 3))
