# SPDX-License-Identifier: Apache-2.0
"""Models in Pyro's statements: distributions, plates, masks, guides of their own."""

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from pyro import poutine
from pyro.infer.autoguide import AutoDelta, AutoNormal
from torch import nn
from torch.distributions import constraints

from tests.objectives.odd_training import NUM_DATA, READS, Odd, mlp, odd, rows


def numbers():
    return rows(4, target="number")


def statements(observe, **others):
    """Return a model of two weights, whose observed sites a function states."""

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(4), 1.0).to_event(1))
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        with pyro.plate("data", NUM_DATA, subsample_size=len(x)):
            observe(x @ w + b, y)

    return Odd(model, numbers(), **others)


@odd(objectives="taylor sampled map vogn ivon diagonal")
def functional_weights():
    return statements(lambda f, y: pyro.sample("y", dist.Normal(f, 0.3), obs=y))


@odd(objectives="map taylor")
def functional_layers():
    def model(x, y=None):
        w1 = pyro.sample("w1", dist.Normal(torch.zeros(5, 4), 1.0).to_event(2))
        w2 = pyro.sample("w2", dist.Normal(torch.zeros(3, 5), 1.0).to_event(2))
        logits = F.linear(torch.tanh(F.linear(x, w1)), w2)
        with pyro.plate("data", NUM_DATA, subsample_size=len(x)):
            pyro.sample("y", dist.Categorical(logits=logits), obs=y)

    return Odd(model, rows(4))


@odd(objectives="taylor map sampled")
def pyro_module():
    net = mlp(nn.BatchNorm1d(6))

    def model(x, y=None):
        pyro.module("net", net)
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", NUM_DATA, subsample_size=len(x)):
            pyro.sample("y", dist.Categorical(logits=net(x) + w), obs=y)

    return Odd(model, rows(4), net=net)


@odd(objectives="taylor sampled")
def hierarchical_prior():
    def model(x, y=None):
        scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
        w = pyro.sample("w", dist.Normal(torch.zeros(4), scale).to_event(1))
        with pyro.plate("data", NUM_DATA, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(x @ w, 0.3), obs=y)

    return Odd(model, numbers())


@odd(objectives="taylor sampled vogn map")
def learned_noise():
    def observe(f, y):
        noise = pyro.param("noise", torch.tensor(0.5), constraint=constraints.positive)
        pyro.sample("y", dist.Normal(f, noise), obs=y)

    return statements(observe)


@odd(objectives="sampled")
def amortised_latents():
    encoder, decoder = nn.Linear(4, 4), nn.Linear(2, 4)

    def model(x, y=None):
        pyro.module("decoder", decoder)
        with pyro.plate("data", NUM_DATA, subsample_size=len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(len(x), 2), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(decoder(z), 0.5).to_event(1), obs=x)

    def guide(x, y=None):
        pyro.module("encoder", encoder)
        with pyro.plate("data", NUM_DATA, subsample_size=len(x)):
            loc, scale = encoder(x).chunk(2, -1)
            pyro.sample("z", dist.Normal(loc, F.softplus(scale)).to_event(1))

    return Odd(model, numbers(), net=nn.ModuleList([encoder, decoder]), guide=lambda _: guide)


@odd(objectives="sampled map taylor")
def plate_that_draws():
    x, y = torch.cat([x for x, _ in numbers()]), torch.cat([y for _, y in numbers()])

    def model():
        w = pyro.sample("w", dist.Normal(torch.zeros(4), 1.0).to_event(1))
        with pyro.plate("data", len(x), subsample_size=5) as rows:
            pyro.sample("y", dist.Normal(x[rows] @ w, 0.3), obs=y[rows])

    return Odd(model, [()])


@odd(objectives="taylor map sampled")
def several_sites():
    def observe(f, y):
        pyro.sample("y", dist.Normal(f, 0.3), obs=y)
        pyro.sample("sign", dist.Bernoulli(logits=f), obs=(y > 0).float())

    return statements(observe)


@odd(objectives="map sampled")
def factor_statement():
    def observe(f, y):
        pyro.factor("penalty", -0.1 * f**2)
        pyro.sample("y", dist.Normal(f, 0.3), obs=y)

    return statements(observe)


@odd(objectives="taylor map sampled")
def masked_sites():
    def observe(f, y):
        with poutine.mask(mask=y > 0):
            pyro.sample("y", dist.Normal(f, 0.3), obs=y)

    return statements(observe)


@odd(objectives="map sampled")
def partly_observed():
    def observe(f, y):
        pyro.sample("y", dist.Normal(f, 0.3).mask(y > 0), obs=torch.where(y > 0, y, 0.0))

    return statements(observe)


@odd(objectives="taylor map")
def scaled_sites():
    def observe(f, y):
        with poutine.scale(scale=0.5):
            pyro.sample("y", dist.Normal(f, 0.3), obs=y)

    return statements(observe)


@odd(READS, objectives="map taylor")
def missing_rows_left_out():
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(4), 1.0).to_event(1))
        known = y > 0
        with pyro.plate("data", NUM_DATA, subsample_size=len(x)):
            pass
        with pyro.plate("known", int(known.sum())), poutine.scale(scale=NUM_DATA / len(x)):
            pyro.sample("y", dist.Normal((x @ w)[known], 0.3), obs=y[known])

    return Odd(model, numbers())


def positive(y):
    return y.abs() + 0.1


FAMILIES = {
    "poisson": lambda f, y: (dist.Poisson(f.exp()), y.abs().round()),
    "student": lambda f, y: (dist.StudentT(4.0, f, 0.5), y),
    "beta": lambda f, y: (dist.Beta(f.exp(), 2.0), torch.sigmoid(y)),
    "negative_binomial": lambda f, y: (dist.NegativeBinomial(3.0, logits=f), y.abs().round()),
    "von_mises": lambda f, y: (dist.VonMises(f, 2.0), y.clamp(-3, 3)),
    "gamma": lambda f, y: (dist.Gamma(2.0, f.exp()), positive(y)),
}


def family(name):
    def make():
        def observe(f, y):
            fn, value = FAMILIES[name](f, y)
            pyro.sample("y", fn, obs=value)

        return statements(observe)

    make.__name__ = name
    return make


for _name in FAMILIES:
    odd(objectives="map sampled" + (" taylor" if _name not in ("beta", "von_mises") else ""))(family(_name))


@odd(objectives="map sampled")
def correlated_outputs():
    def observe(f, y):
        mean = torch.stack([f, 2 * f], -1)
        scale = torch.tensor([[1.0, 0.0], [0.5, 1.0]])
        pyro.sample("y", dist.MultivariateNormal(mean, scale_tril=scale), obs=torch.stack([y, y], -1))

    return statements(observe)


@odd(objectives="map sampled")
def proportions():
    def observe(f, y):
        value = torch.softmax(torch.stack([y, 2 * y, -y], -1), -1)
        pyro.sample("y", dist.Dirichlet(torch.stack([f, -f, f * 0], -1).exp()), obs=value)

    return statements(observe)


@odd(objectives="map sampled")
def dirichlet_prior():
    def model(x, y=None):
        p = pyro.sample("p", dist.Dirichlet(torch.ones(3)))
        with pyro.plate("data", NUM_DATA, subsample_size=len(x)):
            pyro.sample("y", dist.Categorical(p), obs=y)

    return Odd(model, rows(4), guide=lambda m: AutoDelta(m))


@odd(objectives="map sampled")
def markov_loop():
    def model(x, y=None):
        drift = pyro.sample("drift", dist.Normal(0.0, 1.0))
        z = torch.zeros(len(x))
        with pyro.plate("data", NUM_DATA, subsample_size=len(x)):
            for t in pyro.markov(range(4)):
                z = torch.tanh(z + drift)
                pyro.sample(f"x_{t}", dist.Normal(z, 0.5), obs=x[:, t])

    return Odd(model, numbers())


@odd(objectives="sampled taylor")
def pyros_normal_guide():
    return statements(
        lambda f, y: pyro.sample("y", dist.Normal(f, 0.3), obs=y),
        guide=lambda m: AutoNormal(m, init_scale=0.01),
    )


@odd(objectives="map sampled taylor")
def scaled_from_outside():
    """Pyro's handler around a model."""
    inner = statements(lambda f, y: pyro.sample("y", dist.Normal(f, 0.3), obs=y))
    return Odd(poutine.scale(inner.model, scale=0.5), inner.batches)


@odd(objectives="map")
def outside_support():
    """A value outside the support, which an ordinary step explains."""
    batches = [(x, y.abs() + 0.1) for x, y in numbers()]
    bad = torch.full((8,), -1.0)

    def observe(f, y):
        pyro.sample("y", dist.Gamma(2.0, f.exp()), obs=y)

    def step(svi, elbo, x, y):
        try:
            return svi.step(x, y)
        except ValueError as error:
            return str(error)

    made = statements(observe, step=step)
    made.batches = [lambda k: (batches[0][0], bad) if k == 30 else batches[k % 4]]
    return made
