# SPDX-License-Identifier: Apache-2.0
"""A network with batch normalisation, minibatches for it, and its objective."""

from collections.abc import Iterator

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor, nn

import pyro_dvi as dvi
from pyro_dvi.natural_gradients.ivon import IVON, IVONOptimizer
from pyro_dvi.natural_gradients.updates import OGN, VOGN, OGNOptimizer, VOGNOptimizer

N, M = 20, 8


OPTIMIZERS = [VOGN, OGN, IVON]


TORCH_OPTIMIZERS = [VOGNOptimizer, OGNOptimizer, IVONOptimizer]


class Net(pyro.nn.PyroModule):
    """A network with batch normalisation, which gets Adam steps."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)
        self.net = dvi.to_bayesian_(net, prior_scale=1.0)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        f = self.net(x)[:, 0]
        with pyro.plate("data", N, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(f, 0.5), obs=y)


def batches(
    count: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Iterator[tuple[Tensor, Tensor]]:
    """Full minibatches and ragged ones."""
    generator = torch.Generator().manual_seed(0)
    for t in range(count):
        x = torch.randn(M - 3 * (t % 3 == 2), 3, generator=generator).to(device, dtype)
        yield x, x.sum(1).sin()


def elbo(particles: int = 1) -> dvi.NaturalGradientELBO:
    schedule = dvi.schedules.LinearWarmup(6, start=0.1)
    return dvi.NaturalGradientELBO(kl_weight=schedule, num_particles=particles, num_data=N)
