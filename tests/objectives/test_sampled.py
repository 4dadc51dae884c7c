# SPDX-License-Identifier: Apache-2.0
"""SampledELBO against closed forms and Pyro's Trace_ELBO, with the weight of the KL divergence that Pyro's has not."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import (
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
    AutoStructured,
)
from pyro.poutine import replay, trace
from torch import nn

import pyro_dvi as dvi
from pyro_dvi.errors import GuideError, ModelError
from pyro_dvi.objectives.sampled import SampledELBO
from tests.models import GUIDES, POINT_GUIDE, LinearRegression, gradients
from tests.objectives.closed_form import check_full_batch

every_guide = pytest.mark.parametrize("case", GUIDES, ids=lambda c: c.name)


@pytest.fixture
def problem() -> LinearRegression:
    return LinearRegression()


@pytest.mark.every(4)
@every_guide
def test_loss_and_gradients_have_the_closed_form_as_their_mean(problem, case):
    """Two-sided z-tests at 4.5 of 200 draws, at most 9 numbers a guide: false alarm about once in 16,000 seeds."""
    pyro.set_rng_seed(0)
    guide, elbo, beta = case.start(problem), SampledELBO(kl_weight=0.3), 0.3
    draws = []
    for _ in range(200):
        loss = elbo.loss_and_grads(problem.model, guide, problem.x, problem.y)
        grads = gradients()
        draws.append(torch.cat([torch.tensor([loss]), *(grads[name].reshape(-1) for name in sorted(grads))]))
    found = torch.stack(draws).double()
    exact = problem.loss(case.moments(guide), beta)
    exact.backward()
    grads = gradients()
    expected = torch.cat([exact.detach().reshape(1), *(grads[name].reshape(-1) for name in sorted(grads))])
    error = found.std(0) / len(draws) ** 0.5 + 1e-9
    assert ((found.mean(0) - expected).abs() < 4.5 * error).all()
    assert elbo.divergence == "closed form"


@pytest.mark.parametrize("case", [POINT_GUIDE], ids=["AutoDelta"])
def test_a_point_mass_is_maximum_a_posteriori(problem, case):
    check_full_batch(SampledELBO(), problem, case, 1.0)


@pytest.mark.parametrize("kl_weight", [0.0, 0.3])
def test_of_a_point_mass_the_weight_is_that_of_the_log_prior(problem, kl_weight):
    guide = POINT_GUIDE.start(problem)
    point = POINT_GUIDE.moments(guide)
    fit = (
        dist.Normal(problem.x @ point["weight"][0] + point["bias"][0], problem.noise)
        .log_prob(problem.y)
        .sum()
    )
    prior = -problem.map_loss(point) - fit
    loss = SampledELBO(kl_weight=kl_weight).loss(problem.model, guide, problem.x, problem.y)
    assert loss == pytest.approx(-(fit + kl_weight * prior).item(), rel=1e-12)


def structured(model):
    dependencies = {"bias": {"weight": lambda value: value.sum(-1, keepdim=True)}}
    return AutoStructured(
        model, conditionals={"weight": "normal", "bias": "normal"}, dependencies=dependencies
    )


class Chained:
    """A guide in which one site depends on another."""

    def __call__(self, x, y=None):
        loc = pyro.param("loc", lambda: x.new_full((x.shape[1],), 0.2))
        weight = pyro.sample("weight", dist.Normal(loc, 0.3).to_event(1))
        pyro.sample("bias", dist.Normal(weight.sum(), 0.2))


DEPENDENT = {
    "AutoMultivariateNormal": AutoMultivariateNormal,
    "AutoLowRankMultivariateNormal": AutoLowRankMultivariateNormal,
    "AutoStructured": structured,
    "handwritten": lambda _: Chained(),
}


@pytest.mark.parametrize("make", DEPENDENT.values(), ids=DEPENDENT)
def test_dependent_guides_are_those_of_pyro_at_weight_one(problem, make):
    """With the same draws, loss and gradients are the same numbers."""
    pyro.set_rng_seed(0)
    guide, elbo, data = make(problem.model), SampledELBO(num_particles=2), (problem.x, problem.y)
    guide(*data)
    elbo.loss(problem.model, guide, *data)  # which looks at them
    assert elbo.divergence == "sampled"
    results = []
    for one in (Trace_ELBO(num_particles=2), elbo):
        pyro.set_rng_seed(1)
        loss = one.loss_and_grads(problem.model, guide, *data)
        results.append((loss, gradients()))
    (theirs, expected), (ours, found) = results
    assert ours == pytest.approx(theirs, rel=1e-10)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("make", [AutoMultivariateNormal, AutoLowRankMultivariateNormal])
def test_dependent_guides_of_constrained_sites_and_sites_in_plates(make):
    """With the same draws, the loss is that of Pyro."""
    pyro.set_rng_seed(0)
    x, y = torch.randn(10, 3), torch.randn(10)
    guide, elbo = make(hierarchical), SampledELBO()
    guide(x, y)
    elbo.loss(hierarchical, guide, x, y)  # which looks at them
    losses = []
    for one in (Trace_ELBO(), elbo):
        pyro.set_rng_seed(1)
        losses.append(one.loss(hierarchical, guide, x, y))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_sampled_divergence_is_weighed(problem):
    guide = AutoMultivariateNormal(problem.model)
    guide(problem.x, problem.y)
    elbo = SampledELBO(kl_weight=0.2)
    elbo.loss(problem.model, guide, problem.x, problem.y)
    pyro.set_rng_seed(3)
    loss = elbo.loss(problem.model, guide, problem.x, problem.y)
    pyro.set_rng_seed(3)
    drawn = trace(guide).get_trace(problem.x, problem.y)
    run = trace(replay(problem.model, drawn)).get_trace(problem.x, problem.y)
    run.compute_log_prob()
    fit = run.nodes["y"]["log_prob_sum"]
    kl = drawn.log_prob_sum() - run.nodes["weight"]["log_prob_sum"] - run.nodes["bias"]["log_prob_sum"]
    assert loss == pytest.approx((0.2 * kl - fit).item(), rel=1e-10)


def hierarchical(x, y=None):
    scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
    with pyro.plate("units", 3):
        w = pyro.sample("w", dist.Normal(0.0, scale))
    with pyro.plate("data", 40, subsample_size=len(x)):
        return pyro.sample("y", dist.Normal(x @ w, 0.3), obs=y)


@pytest.mark.slow
def test_hierarchical_priors_plates_and_minibatches():
    """The mean over draws is that of Trace_ELBO: two-sided z-test at 4 of 200 draws each."""
    pyro.set_rng_seed(0)
    x = torch.randn(10, 3)
    y = x.sum(1)
    guide = AutoNormal(hierarchical)
    guide(x, y)
    found = []
    for elbo in (SampledELBO(num_data=40), Trace_ELBO()):
        losses = torch.tensor([elbo.loss(hierarchical, guide, x, y) for _ in range(200)])
        found.append((losses.mean(), losses.var() / len(losses)))
    (ours, our_error), (theirs, their_error) = found
    assert (ours - theirs).abs() < 4 * (our_error + their_error).sqrt()


@pytest.mark.slow
def test_training_ends_at_the_posterior_and_is_predicted_by_samples():
    pyro.set_rng_seed(0)
    problem = LinearRegression()
    guide = dvi.MeanFieldGuide(problem.model)
    svi = SVI(problem.model, guide, dvi.optim.Adam({"lr": 0.05}), loss=SampledELBO(num_particles=2))
    dvi.fit(svi, [(problem.x, problem.y)], 250, progress=False)
    precision = problem.information().diagonal() + problem.prior_scale**-2
    scale = torch.cat([guide.scales.weight, guide.scales.bias.reshape(1)]).detach()
    torch.testing.assert_close(scale, precision.rsqrt(), rtol=0.25, atol=0)
    assert isinstance(dvi.predict(problem.model, guide, problem.x).method, dvi.Samples)


def test_a_guide_of_discrete_sites_is_refused():
    def model():
        pyro.sample("z", dist.Bernoulli(0.5))
        pyro.sample("y", dist.Normal(0.0, 1.0), obs=torch.tensor(0.0))

    with pytest.raises(GuideError, match="'z' is Bernoulli, whose draws have no gradient"):
        SampledELBO().loss(model, lambda: pyro.sample("z", dist.Bernoulli(0.3)))


def test_a_latent_that_a_dependent_guide_lacks():
    def model():
        a = pyro.sample("a", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(a.sum() + b, 1.0), obs=torch.tensor(0.0))

    def guide():
        pyro.sample("a", dist.MultivariateNormal(torch.zeros(2), torch.eye(2)))

    with pytest.raises(ModelError, match="'b' is neither observed nor in the guide"):
        SampledELBO().loss(model, guide)


def test_networks_with_batch_norm_and_float32():
    net = dvi.to_bayesian_(nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)))
    model = dvi.classifier(net, num_data=20)
    guide = AutoMultivariateNormal(model, init_loc_fn=dvi.bayesian.init_to_module)
    x, y = torch.randn(20, 3), torch.randint(2, (20,))
    svi = SVI(model, guide, dvi.optim.Adam({"lr": 0.01}), loss=SampledELBO(kl_weight=0.1))
    history = dvi.fit(svi, [(x, y)], 30, progress=False)
    assert history["loss"][-1] < history["loss"][0]
