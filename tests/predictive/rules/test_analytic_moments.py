# SPDX-License-Identifier: Apache-2.0
"""Prediction by moments: closed forms, samples as reference, every kind of likelihood and guide."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoDelta, AutoNormal
from torch import nn

import pyro_dvi as dvi
from pyro_dvi.links import GaussHermite, MomentMatched, Probit, SobolSoftmax
from tests.models import GUIDES, LinearRegression


def network(outputs: int) -> nn.Module:
    net = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, outputs)).double()
    return dvi.to_bayesian_(net, prior_scale=1.0)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.linspace(-2, 2, 24, dtype=torch.float64).reshape(12, 2)


@pytest.mark.parametrize("case", GUIDES, ids=lambda c: c.name)
def test_linear_regression_has_its_closed_form(case):
    problem = LinearRegression()
    guide = case.start(problem)
    prediction = dvi.predict(problem.model, guide, (problem.x, problem.y), method=dvi.Moments())
    (weight, sw), (bias, sb) = case.moments(guide)["weight"], case.moments(guide)["bias"]
    mean = problem.x @ weight + bias
    variance = problem.x.square() @ sw.square().expand_as(weight) + sb**2 + problem.noise**2
    torch.testing.assert_close(prediction.mean, mean.detach(), atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(prediction.variance, variance.detach(), atol=1e-10, rtol=1e-10)
    expected = dist.Normal(mean, variance.sqrt()).log_prob(problem.y)
    torch.testing.assert_close(prediction.log_likelihood(), expected.detach(), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("noise", [MomentMatched(), GaussHermite(16)], ids=lambda n: type(n).__name__)
def test_regression_agrees_with_many_samples(x, noise):
    """Two tanh heads that share hidden units; 1,500 draws, fixed seed, a few per cent."""
    model = dvi.regressor(network(2), num_data=12, noise_scale=dvi.bayesian.Heteroscedastic())
    guide = dvi.MeanFieldGuide(model, scale=dvi.guides.PerWeight(log_offset=-2.0))
    guide.initialize(x, x[:, :1])
    moments = dvi.predict(model, guide, (x, x[:, :1]), method=dvi.Moments(noise=noise))
    sampled = dvi.predict(model, guide, (x, x[:, :1]), method=dvi.Samples(1500), seed=1)
    torch.testing.assert_close(moments.mean, sampled.mean, atol=0.05, rtol=0)
    torch.testing.assert_close(moments.variance, sampled.variance, atol=0, rtol=0.1)
    torch.testing.assert_close(moments.log_likelihood(), sampled.log_likelihood(), atol=0.1, rtol=0)


@pytest.mark.parametrize("link", [SobolSoftmax(), Probit()], ids=lambda c: type(c).__name__)
def test_class_probabilities_agree_with_many_samples(x, link):
    model = dvi.classifier(network(3), num_data=12)
    guide = dvi.MeanFieldGuide(model)
    guide.initialize(x, torch.arange(12) % 3)
    moments = dvi.predict(model, guide, x, method=dvi.Moments(link=link))
    sampled = dvi.predict(model, guide, x, method=dvi.Samples(1000), seed=1)
    torch.testing.assert_close(moments.probabilities.sum(-1), torch.ones(12, dtype=torch.float64))
    torch.testing.assert_close(moments.probabilities, sampled.probabilities, atol=0.015, rtol=0)


@pytest.mark.parametrize("family", [dist.Bernoulli, dist.Categorical])
def test_sure_and_wrong_costs_what_it_costs_by_samples(family):
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        logits = torch.stack([0 * x, w * x], -1) if family is dist.Categorical else w * x
        with pyro.plate("data", len(x)):
            return pyro.sample("obs", family(logits=logits), obs=y)

    data = torch.full((4,), 40.0), torch.zeros(4)
    guide = dvi.MeanFieldGuide(model)
    guide.initialize(*data)
    with torch.no_grad():
        for name, parameter in guide.named_parameters():
            parameter.fill_(1.0 if name.startswith("locs") else -9.0)
    moments, sampled = (
        dvi.predict(model, guide, data, method=m, seed=0).metrics()["nll"]
        for m in (dvi.Moments(), dvi.Samples(50))
    )
    assert moments == pytest.approx(40.0, abs=0.05) and sampled == pytest.approx(moments, abs=0.05)


def test_it_is_the_rule_of_multiplicative_noise(x):
    model = dvi.regressor(network(1), num_data=12)
    guide = dvi.MultiplicativeNoiseGuide(model)
    guide.initialize(x, x[:, 0])
    assert isinstance(dvi.predict(model, guide, x).method, dvi.Moments)
    guide.prediction_rule = dvi.AtMean()
    assert isinstance(dvi.predict(model, guide, x).method, dvi.AtMean)


def test_a_point_mass_predicts_as_at_its_mean(x):
    model = dvi.regressor(network(1), num_data=12, noise_scale=0.3)
    guide = AutoDelta(model, init_loc_fn=dvi.bayesian.init_to_module)
    guide(x, x[:, 0])
    moments, mean = (dvi.predict(model, guide, x, method=m) for m in (dvi.Moments(), dvi.AtMean()))
    torch.testing.assert_close(moments.mean, mean.mean)
    torch.testing.assert_close(moments.variance, mean.variance)


def uncertain_noise(x, guide_class, prior):
    """A regression, its guide, and the parameter that sets how uncertain the latent noise scale is."""
    model = dvi.regressor(network(1), num_data=12, noise_scale=prior)
    guide = guide_class(model)
    guide(x, x[:, 0])
    spread = next(p for n, p in guide.named_parameters() if "scales" in n and "noise_scale" in n)
    return model, guide, spread.data.fill_(-0.7)


@pytest.mark.parametrize("guide_class", [dvi.MeanFieldGuide, AutoNormal])
@pytest.mark.parametrize("prior", [dist.LogNormal(-1.0, 0.5), dist.Gamma(4.0, 4.0), dist.Uniform(0.1, 2.0)])
def test_a_transformed_latent_is_integrated_over_its_gaussian(x, guide_class, prior):
    model, guide, spread = uncertain_noise(x, guide_class, prior)
    first, again = (dvi.predict(model, guide, x, method=dvi.Moments(), seed=k) for k in (0, 1))
    assert torch.equal(first.variance, again.variance)
    middle = ((torch.arange(2000) + 0.5) / 2000).tolist()
    noise = torch.as_tensor(guide.quantiles(middle)["noise_scale"]).square().mean()  # to 0.2 %
    spread.fill_(-20.0)
    median = guide.median()["noise_scale"]
    certain = dvi.predict(model, guide, x, method=dvi.Moments())
    torch.testing.assert_close(certain.mean, first.mean)
    torch.testing.assert_close(first.variance, certain.variance - median**2 + noise, rtol=5e-3, atol=0)


@pytest.mark.parametrize(
    "prior",
    [
        dist.HalfNormal(torch.ones(2).double()),
        dist.Uniform(torch.tensor([0.1, 1.0]).double(), torch.tensor([0.5, 3.0]).double()),
        dist.Pareto(torch.tensor([0.1, 0.4]).double(), 2.0),
    ],
    ids=lambda prior: type(prior).__name__,
)
@pytest.mark.parametrize(
    "second", [lambda s: s[1], lambda s: s[1:], lambda s: s.flip(0)[0] + 0.1], ids=["1", "1:", "flipped"]
)
def test_an_element_of_a_transformed_vector_is_integrated_over_its_own_gaussian(x, prior, second):
    """One latent holds the scale of the weights' prior and that of the noise."""

    def model(x, y=None):
        s = pyro.sample("s", prior.to_event(1))
        w = pyro.sample("w", dist.Normal(torch.zeros(2).double(), s[0]).to_event(1))
        with pyro.plate("data", len(x)):
            return pyro.sample("obs", dist.Normal(x @ w, second(s)), obs=y)

    guide = dvi.MeanFieldGuide(model)
    svi = SVI(model, guide, dvi.optim.Adam({"lr": 0.02}), loss=dvi.MomentPropagationELBO())
    dvi.fit(svi, [(x, x[:, 0])], 2, progress=False)
    found = dvi.predict(model, guide, x)
    assert found.method == dvi.Moments()
    middle = ((torch.arange(2000) + 0.5) / 2000).tolist()
    own = torch.as_tensor(guide.quantiles(middle)["s"]).detach()
    noise = second(own.T).square().mean()  # to 0.2 %
    function = x.square() @ guide.scales.w.detach().square()
    torch.testing.assert_close(found.variance, function + noise, rtol=5e-3, atol=0)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "family", ["Poisson", "Bernoulli", "Laplace", "StudentT", "LogNormal", "to_event", "mask"]
)
def test_other_families_have_mean_variance_and_density(x, family):
    families = {
        "Poisson": lambda f: dist.Poisson(torch.exp(f)),
        "Bernoulli": lambda f: dist.Bernoulli(logits=f),
        "Laplace": lambda f: dist.Laplace(f, 0.5),
        "StudentT": lambda f: dist.StudentT(5.0, f, 0.5),
        "LogNormal": lambda f: dist.LogNormal(f, 0.5),
        "to_event": lambda f: dist.Normal(f.unsqueeze(-1), 0.5).to_event(1),
        "mask": lambda f: dist.Normal(f, 0.5).mask(torch.tensor(True)),
    }

    net = network(1)

    def model(x, y=None):
        f = net(x)[:, 0]
        with pyro.plate("data", len(x)):
            return pyro.sample("obs", families[family](f), obs=y)

    y = families[family](x[:, 0]).sample()
    guide = dvi.MeanFieldGuide(model)
    guide.initialize(x, y)
    moments = dvi.predict(model, guide, (x, y), method=dvi.Moments())
    sampled = dvi.predict(model, guide, (x, y), method=dvi.Samples(800), seed=2)
    torch.testing.assert_close(moments.mean, sampled.mean, atol=0.05, rtol=0.05)
    torch.testing.assert_close(moments.log_likelihood(), sampled.log_likelihood(), atol=0.05, rtol=0.05)


def test_batches_and_modes_do_not_matter(x):
    net = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 1)).double()
    model = dvi.regressor(dvi.to_bayesian_(net), num_data=12)
    guide = dvi.MultiplicativeNoiseGuide(model)
    guide.initialize(x, x[:, 0])
    before = net[1].running_mean.clone()
    whole = dvi.predict(model, guide, x)
    parts = dvi.predict(model, guide, x, batch_size=5)
    torch.testing.assert_close(whole.variance, parts.variance)
    assert torch.equal(before, net[1].running_mean)
    assert net.training
