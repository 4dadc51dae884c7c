# SPDX-License-Identifier: Apache-2.0
"""Quantiles of every family by every rule: against scipy where it knows the family, and against draws."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import stats

import pyro_dvi as dvi
from pyro_dvi import AtMean, LaplaceGuide, MeanFieldGuide, Moments, Samples, predict

N, K, S = 6, 5, 4000
LEVELS = [0.025, 0.3, 0.5, 0.975]
X = torch.linspace(-1, 1, N, dtype=torch.float64)

pytestmark = pytest.mark.usefixtures("double")

FAMILIES = {
    "Gumbel": lambda f: dist.Gumbel(f, 1.0),
    "Normal": lambda f: dist.Normal(f, 0.5),
    "events": lambda f: dist.Normal(torch.stack([f, -f], -1), 0.5).to_event(1),
    "vectors": lambda f: dist.MultivariateNormal(torch.stack([f, -f], -1), torch.eye(2)),
    "LogNormal": lambda f: dist.LogNormal(f, 0.5),
    "Gamma": lambda f: dist.Gamma(0.3, f.exp()),
    "Exponential": lambda f: dist.Exponential(f.exp()),
    "Weibull": lambda f: dist.Weibull(f.exp(), 1.5),
    "Uniform": lambda f: dist.Uniform(0.0, f.exp()),
    "Cauchy": lambda f: dist.Cauchy(f, 0.5),  # no mean
    "StudentT": lambda f: dist.StudentT(4.0, f, 0.5),  # no distribution function
    "Beta": lambda f: dist.Beta(f.exp(), 2.0),
    "Poisson": lambda f: dist.Poisson((1 + f).exp()),
    "rare": lambda f: dist.Poisson((f - 4).exp()),
    "many": lambda f: dist.Poisson((6 + 0.1 * f).exp()),
    "NegativeBinomial": lambda f: dist.NegativeBinomial(5.0, logits=f),
    "GammaPoisson": lambda f: dist.GammaPoisson(2.0, f.exp()),
    "Geometric": lambda f: dist.Geometric(logits=f),
    "Binomial": lambda f: dist.Binomial(10, logits=f),
    "zero-inflated": lambda f: dist.ZeroInflatedPoisson((1 + f).exp(), gate=torch.tensor(0.3)),
    "count events": lambda f: dist.Poisson(torch.stack([f, -f], -1).exp()).to_event(1),
    "Multinomial": lambda f: dist.Multinomial(3, logits=torch.stack([f, -f], -1)),
}


def model_of(family):
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            return pyro.sample("obs", FAMILIES[family](w[0] * x + w[1]), obs=y)

    return model


def predicted(family, rule):
    torch.manual_seed(0)
    model, y = model_of(family), FAMILIES[family](0.3 * X).sample()
    y = y / 4 if family == "Uniform" else y  # below the bound at the mode
    if rule is not None:
        guide = MeanFieldGuide(model)
        guide.initialize(X, y)
        return predict(model, guide, X, rule, seed=0)
    laplace = LaplaceGuide(model)
    laplace.initialize(X, y)
    laplace.fit([(X, y)], unconverged="accept")
    return predict(model, laplace, X)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the Fisher information:pyro_dvi.errors.DviWarning")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "rule", [AtMean(), Moments(), None, Samples(K)], ids=["mean", "moments", "laplace", "samples"]
)
def test_quantiles_are_those_of_draws(family, rule):
    """The share of 4,000 draws up to a quantile, and below it: five standard errors, also of quantiles from draws."""
    prediction = predicted(family, rule)
    drawn, found = prediction.sample(S, seed=1), prediction.quantiles(LEVELS)
    assert found.shape == (len(LEVELS), *drawn.shape[1:])
    assert bool((found.diff(dim=0) >= 0).all())
    for level, values in zip(LEVELS, found, strict=True):
        error = 5 * math.sqrt(level * (1 - level) * (1 / S + 1 / 4096))
        assert bool(((drawn <= values).double().mean(0) >= level - error).all())
        assert bool(((drawn < values).double().mean(0) <= level + error).all())
    support = FAMILIES[family](X).support
    lowest = getattr(getattr(support, "base_constraint", support), "lower_bound", None)
    if lowest is not None and family != "Uniform":
        assert bool((found >= lowest).all())
        assert support.is_discrete or bool((found > 0).all())
    if support.is_discrete:
        assert torch.equal(found, found.round())
    assert torch.equal(prediction.quantiles(LEVELS[0]), found[0])  # without random numbers of its own


COUNTS = {
    "Poisson": lambda f: stats.poisson(np.exp(1 + f)),
    "rare": lambda f: stats.poisson(np.exp(f - 4)),
    "many": lambda f: stats.poisson(np.exp(6 + 0.1 * f)),
    "NegativeBinomial": lambda f: stats.nbinom(5, 1 / (1 + np.exp(f))),
    "GammaPoisson": lambda f: stats.nbinom(2, np.exp(f) / (1 + np.exp(f))),
    "Geometric": lambda f: stats.geom(1 / (1 + np.exp(-f)), loc=-1),
    "Binomial": lambda f: stats.binom(10, 1 / (1 + np.exp(-f))),
}


@pytest.mark.parametrize("family", COUNTS)
@pytest.mark.parametrize("num_draws", [1, K])
def test_quantiles_of_counts_are_the_generalised_inverse(family, num_draws):
    def guide(x=None, y=None):
        pyro.sample("w", dist.Normal(torch.tensor([1.0, -0.5]), 0.7).to_event(1))

    prediction = predict(model_of(family), guide, X, Samples(num_draws), seed=4, batch_size=4)
    torch.manual_seed(4)
    draws = [draw["w"].numpy() for draw in Samples(num_draws).draws(guide, (X,))]
    counts = np.arange(2000)[:, None]
    cdf = np.mean([COUNTS[family](w[0] * X.numpy() + w[1]).cdf(counts) for w in draws], 0)
    for level in (0.01, 0.5, 0.999):
        np.testing.assert_array_equal(prediction.quantiles(level), (cdf < level).sum(0))


@pytest.mark.parametrize("family", ["Gamma", "LogNormal"])
def test_a_mixture_over_draws_inverts_the_average_distribution_function(family):
    def guide(x=None, y=None):
        pyro.sample("w", dist.Normal(torch.tensor([1.0, -0.5]), 0.7).to_event(1))

    prediction = predict(model_of(family), guide, X, Samples(K), seed=4, batch_size=4)
    torch.manual_seed(4)
    fns = [FAMILIES[family](draw["w"][0] * X + draw["w"][1]) for draw in Samples(K).draws(guide, (X,))]
    for level in LEVELS:
        values = prediction.quantiles(level)
        reached = torch.stack([fn.cdf(values) for fn in fns]).mean(0)
        torch.testing.assert_close(reached, torch.full_like(reached, level), atol=1e-8, rtol=0)


def test_counts_have_intervals_after_vogn():
    """By the default rule of its objective, without ``keep_draws``."""
    net = dvi.to_bayesian_(torch.nn.Linear(1, 1))

    def model(x, y=None):
        rate = net(x)[:, 0].exp()
        with pyro.plate("data", 20, subsample_size=len(x)):
            return pyro.sample("obs", dist.Poisson(rate), obs=y)

    x = torch.linspace(-1, 1, 20)[:, None]
    y = torch.poisson((1 + x[:, 0]).exp())
    guide = dvi.NaturalGradientGuide(model)
    svi = pyro.infer.SVI(model, guide, dvi.VOGN({"lr": 0.05}), loss=dvi.NaturalGradientELBO())
    dvi.fit(svi, [(x, y)], 20, progress=False)
    prediction = predict(model, guide, (x, y))
    low, high = prediction.interval(0.9)
    assert prediction.method == Samples(30) and bool(((low >= 0) & (low < high)).all())
    assert prediction.metrics()["coverage_95"] > 0.7
    assert prediction.sample(5).shape == (5, 20)
