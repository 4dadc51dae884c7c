# SPDX-License-Identifier: Apache-2.0
"""The task with a network that is already trained, with plain torch."""

import torch
from torch.nn.functional import cross_entropy

from benchmarks.programs.task import EPOCHS, loader, net, test, test_loader, validation

__all__ = ["loader", "net", "test", "test_loader", "validation"]

adam = torch.optim.Adam(net.parameters(), 0.01)
for _ in range(EPOCHS):
    for x, y in loader:
        adam.zero_grad()
        cross_entropy(net(x), y).backward()
        adam.step()
