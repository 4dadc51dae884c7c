# SPDX-License-Identifier: Apache-2.0
"""IVON of torch-ivon."""

import ivon
from torch.nn.functional import cross_entropy, nll_loss

from benchmarks.programs.task import EPOCHS, NUM_DATA, loader, net, test

optimizer = ivon.IVON(net.parameters(), lr=0.1, ess=NUM_DATA)
for _ in range(EPOCHS):
    for x, y in loader:
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            cross_entropy(net(x), y).backward()
        optimizer.step()
x, y = test
probabilities = 0
for _ in range(30):
    with optimizer.sampled_params():
        probabilities += net(x).softmax(1).detach() / 30
nll = nll_loss(probabilities.log(), y)
