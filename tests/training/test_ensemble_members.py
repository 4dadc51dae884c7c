# SPDX-License-Identifier: Apache-2.0
"""Trainings that are repeated do not touch each other, nor what is around them."""

import random

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from torch import nn

import pyro_dvi as dvi
from pyro_dvi.errors import ArgumentError
from pyro_dvi.training import train_ensemble
from pyro_dvi.training.ensemble import train_apart

X = torch.linspace(-1, 1, 20)[:, None]


def train(slope: float = 1.0, network: nn.Module | None = None):
    net = dvi.to_bayesian_(nn.Linear(1, 1) if network is None else network)
    model = dvi.regressor(net, 20, noise_scale=0.3)
    guide = dvi.MeanFieldGuide(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), loss=dvi.TaylorELBO())
    dvi.fit(svi, [(X, slope * X)], 3, progress=False)
    return model, guide


def train_in_modules():
    with pyro.settings.context(module_local_params=True):
        model = dvi.regressor(dvi.to_bayesian_(nn.Linear(1, 1)), 20, noise_scale=0.3)
        guide = AutoNormal(model)
        elbo = Trace_ELBO()(model, guide)
        elbo(X, X)
        dvi.fit(elbo, [(X, X)], 3, optimizer=torch.optim.Adam(elbo.parameters()), progress=False)
    return model, guide


def mean_of(posterior):
    with posterior.in_store():
        return dvi.predict(posterior.model, posterior.guide, X, dvi.AtMean()).mean


def test_each_is_predicted_in_its_own_store():
    first = train_apart(lambda: train(1.0), seed=0)
    before = mean_of(first)
    second = train_apart(lambda: train(-1.0), seed=1, others=[first])
    assert len(pyro.get_param_store()) == 0
    assert not torch.equal(mean_of(second), before)
    assert torch.equal(mean_of(first), before)
    second.put_back()
    assert torch.equal(dvi.predict(second.model, second.guide, X, dvi.AtMean()).mean, mean_of(second))


def test_the_same_seed_gives_the_same_posterior_and_leaves_no_trace():
    pyro.get_param_store()["mine"] = torch.ones(1)
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    first, second, other = (train_apart(train, seed) for seed in (3, 3, 4))
    assert list(pyro.get_param_store()) == ["mine"]
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert random.getstate() == states[2]
    assert torch.equal(mean_of(first), mean_of(second))
    assert not torch.equal(mean_of(first), mean_of(other))


def test_parameters_that_live_in_modules():
    with pyro.settings.context(module_local_params=True):
        first = train_apart(train_in_modules, seed=0)
        before = mean_of(first)
        second = train_apart(train_in_modules, seed=1, others=[first])
        assert not first.store["params"]
        assert torch.equal(mean_of(first), before)
        assert not torch.equal(mean_of(second), before)


def test_a_failure_leaves_the_store_as_it_was():
    pyro.get_param_store()["mine"] = torch.ones(1)

    def fail():
        train()
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        train_apart(fail, seed=0)
    assert list(pyro.get_param_store()) == ["mine"]


class Both:
    """Model and guide as methods of one object, as Pyro's tutorials write autoencoders."""

    def model(self, x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(w * x[:, 0], 1.0), obs=y)

    def guide(self, x, y=None):
        pyro.sample("w", dist.Normal(pyro.param("loc", torch.randn(())), 0.1))


def separately(x, y=None):
    return Both().guide(x, y)


def by_hand(guide):
    both = Both()
    model, guide = both.model, both.guide if guide is None else guide(both.model)
    svi = SVI(model, guide, dvi.optim.Adam({"lr": 0.01}), loss=dvi.TaylorELBO())
    dvi.fit(svi, [(X, X[:, 0])], 1, progress=False)
    return model, guide


@pytest.mark.parametrize("guide", [None, lambda model: separately, AutoNormal, dvi.MeanFieldGuide])
def test_models_and_guides_by_hand(guide):
    model, found = train_ensemble(lambda: by_hand(guide), 2, progress=False)
    assert len(dvi.predict(model, found, X)) == len(X)


def test_a_network_that_two_trainings_share():
    network = nn.Linear(1, 1)

    def train_functional():
        def model(x, y=None):
            scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
            with pyro.plate("data", 20):
                return pyro.sample("y", dist.Normal(pyro.module("net", network)(x)[:, 0], scale), obs=y)

        guide = AutoNormal(model)
        guide(X, X[:, 0])
        return model, guide

    first = train_apart(train_functional, seed=0)
    with pytest.raises(ArgumentError, match="inside train"):
        train_apart(train_functional, seed=1, others=[first])
    network.requires_grad_(False).eval()
    frozen = train_apart(train_functional, seed=0)
    train_apart(train_functional, seed=1, others=[frozen])
