# SPDX-License-Identifier: Apache-2.0
"""Models that must not be run for many draws at a time are noticed, and predicted by the loop."""

import random
import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_dvi import Samples, predict
from pyro_dvi.predictive.engine.vectorised import possible

X = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))


def guide(x, y=None):
    pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))


def around(net):
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            return pyro.sample("obs", dist.Normal(net(x, w), 1.0), obs=y)

    return model


class WithBuffer(nn.Module):
    run: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("run", torch.zeros(2))

    def forward(self, x, w):
        self.run = 0.9 * self.run + 0.1 * w
        return x @ w


class InPlace(WithBuffer):
    def forward(self, x, w):
        self.run.copy_(w)
        return x @ w


class WithAttribute(nn.Module):
    def forward(self, x, w):
        self.last = x @ w
        return self.last


class WithList(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen: dict[str, list[torch.Tensor]] = {"outputs": []}

    def forward(self, x, w):
        self.seen["outputs"] = [x @ w]
        return x @ w


class Parent(nn.Module):
    """Looked into as well where it alone is called."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, w):
        return self.inner.forward(x, w)


@pytest.mark.parametrize("make", [WithBuffer, InPlace, WithAttribute, WithList])
def test_no_tensor_of_many_draws_stays_in_a_module(make):
    net = Parent(make())
    prediction = predict(around(net), guide, X, Samples(5), seed=0, batch_size=3)
    assert prediction.mean.shape == (6,)
    inner = net.inner
    held = [getattr(inner, name) for name in ("run", "last") if hasattr(inner, name)]
    held += getattr(inner, "seen", {}).get("outputs", [])
    assert held
    for value in held:
        assert not torch._C._functorch.is_functorch_wrapped_tensor(value)
        assert value.isfinite().all()
    assert net(X, torch.ones(2)).shape == (6,)


@pytest.mark.parametrize(
    "noise",
    [
        np.random.randn,
        lambda: random.gauss(0.0, 1.0),
        np.random.default_rng(0).standard_normal,  # a generator that nobody can look for
    ],
    ids=["numpy", "python", "own generator"],
)
def test_every_draw_has_its_own_noise_whoever_makes_it(noise):
    np.random.seed(0)
    random.seed(0)

    def constant(x, y=None):
        pyro.sample("w", dist.Delta(torch.zeros(2), event_dim=1))

    prediction = predict(around(lambda x, w: x @ w + noise()), constant, X, Samples(50), seed=0)
    assert 0.5 < float(prediction.epistemic.min()) < 2.0  # 1 but for 50 draws


IMPOSSIBLE = {
    "Poisson": lambda w: dist.Poisson(w),
    "Normal": lambda w: dist.Normal(0.0, w),
    "events": lambda w: dist.Normal(torch.zeros(1), w[:, None]).to_event(1),
    "Uniform": lambda w: dist.Uniform(0.0, w),
    "LogNormal": lambda w: dist.LogNormal(0.0, w),
    "mixture": lambda w: dist.MixtureSameFamily(
        dist.Categorical(torch.ones(len(w), 2)), dist.Normal(torch.zeros(2), w[:, None].expand(-1, 2))
    ),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_distributions_are_not_averaged(name):
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(1.0, 0.5))
        with pyro.plate("data", len(x)):
            return pyro.sample("obs", IMPOSSIBLE[name](w.expand(len(x))), obs=y)

    def wide(x, y=None):
        pyro.sample("w", dist.Normal(1.0, 0.5))

    with warnings.catch_warnings(), pytest.raises(ValueError, match="invalid values|not defined"):
        warnings.simplefilter("ignore")
        predict(model, wide, X, Samples(300), seed=0)


def test_what_is_possible():
    assert possible(dist.Normal(torch.zeros(2), torch.ones(2)))
    assert possible(dist.MultivariateNormal(torch.zeros(2), torch.eye(2)))
    assert possible(dist.Categorical(torch.ones(3)))
    assert not possible(dist.Gamma(torch.tensor(-1.0), 1.0, validate_args=False))
    flags = torch.vmap(lambda s: possible(dist.Normal(0.0, s, validate_args=False)))(
        torch.tensor([1.0, -1.0])
    )
    assert flags.tolist() == [True, False]
