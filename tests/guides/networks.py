# SPDX-License-Identifier: Apache-2.0
"""A network that the tests of several guides share."""

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn

import pyro_dvi as dvi


class Net(pyro.nn.PyroModule):
    """A converted network with batch normalisation, and a regression around it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Softplus(), nn.Linear(4, 1))
        self.weights = {k: v.detach().clone() for k, v in self.net.named_parameters()}
        dvi.to_bayesian_(self.net, prior_scale=0.5)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        f = self.net(x)[:, 0]
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(f, 0.5), obs=y)
        return f
