# SPDX-License-Identifier: Apache-2.0
"""Draws from the prior are those of a loop over runs of the model."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_dvi import regressor, to_bayesian_
from pyro_dvi.core.undisturbed import evaluating, seeder
from pyro_dvi.predictive.rules.rule import PriorSamples
from pyro_dvi.runs.sites import is_latent

X = torch.linspace(-1, 1, 9)[:, None]


def network():
    net = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    model = regressor(to_bayesian_(net), 9, dist.LogNormal(-1.0, 0.3))
    nodes = pyro.poutine.trace(model).get_trace(X).nodes
    return model, [name for name, node in nodes.items() if is_latent(node) and name != "obs"]


def hierarchy(x, y=None):
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    w = pyro.sample("w", dist.Normal(0.0, scale))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(w * x[:, 0], 1.0), obs=y)


def threshold(x, y=None):
    a = pyro.sample("a", dist.Normal(1.5, 1.0))
    b = pyro.sample("b", dist.Normal(torch.where(a > 0, 0.0, 9.0), 0.1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(a + b * x[:, 0], 1.0), obs=y)


def branch(x, y=None):
    a = pyro.sample("a", dist.Normal(1.5, 1.0))
    b = pyro.sample("b", dist.Normal(0.0 if a > 0 else 9.0, 0.1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(a + b * x[:, 0], 1.0), obs=y)


def local(x, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(x[:, 0], 1.0))
        pyro.sample("y", dist.Normal(w * z, 1.0), obs=y)


MODELS = {
    "network": network,
    "hierarchy": lambda: (hierarchy, ["scale", "w"]),
    "a prior that is another for few draws": lambda: (threshold, ["a", "b"]),
    "a branch": lambda: (branch, ["a", "b"]),
    "latents of single examples": lambda: (local, ["w", "z"]),
    "a site that is left to the model": lambda: (local, ["w"]),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("name", MODELS)
def test_the_draws_are_those_of_a_loop(name):
    model, sites = MODELS[name]()
    with evaluating(model), torch.no_grad():
        torch.manual_seed(3)
        found = list(PriorSamples(150, model, (X,), sites).draws(None, (X,)))
        torch.manual_seed(3)
        for draw, seed in zip(found, torch.randint(2**31 - 1, (150,)).tolist(), strict=True):
            seeder()(seed)
            nodes = pyro.poutine.trace(model).get_trace(X).nodes
            assert draw.keys() == set(sites) and len(sites) > 0
            for site in sites:
                torch.testing.assert_close(draw[site], nodes[site]["value"])
