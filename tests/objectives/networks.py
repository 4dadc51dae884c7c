# SPDX-License-Identifier: Apache-2.0
"""A small convolutional network as a model, and pictures for it."""

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn

import pyro_dvi as dvi


class Classifier(pyro.nn.PyroModule):
    def __init__(self, net: nn.Module, num_data: int) -> None:
        super().__init__()
        self.net, self.num_data = net, num_data

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        logits = self.net(x)
        with pyro.plate("data", self.num_data, subsample_size=len(x)):
            return pyro.sample("y", dist.Categorical(logits=logits), obs=y)


def images(
    size: int = 4, pixels: int = 32, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> tuple:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, 3, pixels, pixels, generator=generator)
    return x.to(device, dtype), torch.arange(size, device=device) % 10


def small_net(dtype: torch.dtype = torch.float32) -> Classifier:
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.Softplus(), nn.Flatten(), nn.Linear(36, 10)
    )
    dvi.to_bayesian_(net)
    return Classifier(net, num_data=40).to(dtype)
