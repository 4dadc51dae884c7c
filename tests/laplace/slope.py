# SPDX-License-Identifier: Apache-2.0
"""A slope and a positive noise scale, and a method that knows little."""

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_dvi import LaplaceGuide
from pyro_dvi.laplace import Dense, Hessian, Method
from pyro_dvi.laplace.methods.method import LaplacePosterior
from tests.laplace.problems import guide_at, ragged

X = torch.linspace(-1, 1, 10, dtype=torch.float64)
Y = 0.8 * X + 0.2 * torch.cos(9 * X)


def model(x: Tensor, y: Tensor | None = None) -> Tensor:
    """A slope and a positive noise scale."""
    slope = pyro.sample("slope", dist.Normal(x.new_zeros(()), 1.0))
    scale = pyro.sample("scale", dist.LogNormal(x.new_zeros(()), 1.0))
    with pyro.plate("data", 10, subsample_size=len(x)):
        return pyro.sample("y", dist.Normal(slope * x, scale), obs=y)


LOCS = {"slope": torch.tensor(0.7).double(), "scale": torch.tensor(-1.5).double()}


def fitted(**options: object) -> LaplaceGuide:
    guide = guide_at(model, (X, Y), LOCS)
    guide.fit(ragged(X, Y, 4), Dense(), unconverged="accept", **options)
    return guide


class PointSolver(Method):
    """A method that keeps what no file can hold, and knows nothing but covariances."""

    precision = Hessian()

    def fit(self, local, *, seed):
        return Solutions(local)


class Solutions(LaplacePosterior):
    def __init__(self, local):
        self.mode, self.local = local.point, local

    def covariance(self, query):
        return torch.ones(query.num_rows, query.size, query.size, dtype=torch.float64)
