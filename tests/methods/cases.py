# SPDX-License-Identifier: Apache-2.0
"""Every method, with a network and data."""

from dataclasses import replace

import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule, PyroSample
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_dvi as dvi

EPOCHS = 8
METHODS = {
    "vl": dvi.VariationalLaplace(),
    "moments": dvi.MomentPropagation(),
    "mean-field moments": dvi.MomentPropagation(posterior=dvi.MeanFieldGuide),
    "vogn": dvi.NaturalGradients(),
    "ivon": dvi.NaturalGradients(by=dvi.IVON),
    "noisy k-fac": dvi.NaturalGradients(by=dvi.NoisyKFAC),
    "laplace": dvi.Laplace(),
    "map": dvi.MAP(),
}


def with_lr(method):
    """Natural gradients have no lr."""
    return method if isinstance(method, dvi.NaturalGradients) else replace(method, lr=0.1)


def rows(count, seed, labels=True):
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))
    return x, x.argmax(1) if labels else x.sum(1)


def loader(labels=True):
    return DataLoader(TensorDataset(*rows(60, 0, labels)), batch_size=25, shuffle=True)


def network(outputs=3):
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, outputs))


def fitted(name, net=None, **options):
    options = {"progress": False} | options
    return METHODS[name].fit(network() if net is None else net, loader(), EPOCHS, **options)


class Slope(PyroModule):
    def __init__(self):
        super().__init__()
        self.w = PyroSample(dist.Normal(0.0, 1.0).expand([3]).to_event(1))

    def forward(self, x, y=None):
        mean = x @ self.w
        with pyro.plate("data", 60, subsample_size=len(x)):
            return pyro.sample("obs", dist.Normal(mean, 0.1), obs=y)


def slope(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", 60, subsample_size=len(x)):
        return pyro.sample("obs", dist.Normal(x @ w, 0.1), obs=y)
