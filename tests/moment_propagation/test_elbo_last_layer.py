"""A last layer with covariances, held against closed forms, draws, and refused where it is no last layer."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro import poutine
from pyro.infer import SVI
from pyro.infer.autoguide import (
    AutoDelta,
    AutoGuideList,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
)
from torch import nn

import pyro_dvi as dvi
from pyro_dvi.errors import GuideError, ModelError, UnsupportedError
from pyro_dvi.expectations.logits import Sobol, TiltedBound
from pyro_dvi.guides import MeanField
from pyro_dvi.moment_propagation.last_layer import AllOutputs, LowRank, PerOutput

NOISE = 0.3
DENSE = [AutoMultivariateNormal, lambda model: dvi.LastLayerGuide(model, ["w", "b"], covariance=AllOutputs())]


pytestmark = pytest.mark.usefixtures("double")


@pytest.fixture
def data():
    pyro.set_rng_seed(1)
    x = torch.randn(30, 3)
    return x, x @ torch.tensor([1.0, -2.0, 0.5]) + NOISE * torch.randn(30)


def linear(x, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([1, 3]).to_event(2))
    b = pyro.sample("b", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(F.linear(x, w, b)[:, 0], NOISE), obs=y)


def products(x, y=None):
    """The same model by other functions."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([1, 3]).to_event(2))
    b = pyro.sample("b", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
    with pyro.plate("data", len(x)):
        f = x @ w.T
        f += b
        return pyro.sample("y", dist.Normal(2 * (0.5 * f).squeeze(-1), NOISE), obs=y)


def evidence_and_posterior(x, y):
    design = torch.cat([x, torch.ones(len(x), 1)], 1)
    evidence = dist.MultivariateNormal(
        torch.zeros(len(x)), design @ design.T + NOISE**2 * torch.eye(len(x))
    ).log_prob(y)
    covariance = torch.linalg.inv(torch.eye(4) + design.T @ design / NOISE**2)
    return design, evidence, covariance, covariance @ design.T @ y / NOISE**2


def set_to(guide, mean, covariance):
    """Put the exact posterior into a guide of Pyro or ours."""
    part = guide if isinstance(guide, AutoMultivariateNormal) else guide[0]
    tril = torch.linalg.cholesky(covariance)
    with torch.no_grad():
        part.loc.copy_(mean)
        part.scale = tril.diagonal().clone()
        part.scale_tril = (tril / tril.diagonal()[:, None]).expand_as(part.scale_tril).clone()


@pytest.mark.parametrize("model", [linear, products])
@pytest.mark.parametrize("make", DENSE)
def test_the_loss_at_the_exact_posterior_is_minus_the_log_evidence(data, make, model):
    x, y = data
    design, evidence, covariance, mean = evidence_and_posterior(x, y)
    guide = make(model)
    guide(x, y)
    set_to(guide, mean, covariance)
    elbo = dvi.MomentPropagationELBO()
    assert math.isclose(elbo.loss(model, guide, x, y), -evidence.item(), rel_tol=1e-9)
    gradients = torch.autograd.grad(elbo.differentiable_loss(model, guide, x, y), list(guide.parameters()))
    assert all(g.abs().max() < 1e-7 for g in gradients)
    prediction = dvi.predict(model, guide, x)
    torch.testing.assert_close(prediction.mean, design @ mean)
    torch.testing.assert_close(prediction.variance, ((design @ covariance) * design).sum(1) + NOISE**2)


def network(num_outputs, wrap):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, num_outputs))
    return wrap(dvi.to_bayesian_(net, prior_scale=dvi.bayesian.fan_in))


def spread_out(guide, x, y):
    """Set up a guide with covariances that matter."""
    guide(x, y)
    part = guide[1]
    with torch.no_grad():
        if hasattr(part, "scale_tril"):
            part.scale = torch.full_like(part.scale, 0.4)
            part.scale_tril_unconstrained.normal_(std=0.5)
        elif hasattr(part, "cov_factor"):
            part.scale = torch.full_like(part.scale, 0.4)
    return guide


def drawn_outputs(guide, x, count):
    """Outputs ``[count, n, out]`` of draws of the last layer, at the point mass of the rest."""
    values = guide[0].median()
    hidden = torch.tanh(F.linear(x, values["net.0.weight"], values["net.0.bias"]))
    draws = dense_posterior(guide[1]).sample((count,)).detach()
    num_outputs = draws.shape[1] // 6
    weight, bias = draws[:, : 5 * num_outputs].reshape(count, num_outputs, 5), draws[:, 5 * num_outputs :]
    return torch.einsum("sij,nj->sni", weight, hidden.detach()) + bias[:, None]


def likelihood(case, outputs):
    """The observed distribution given outputs."""
    if case == "classes":
        return dist.Categorical(logits=outputs)
    if case == "noise":
        return dist.Normal(outputs[..., 0], 0.5)
    return dist.Normal(outputs[..., :2], (0.5 * outputs[..., 2:]).exp()).to_event(1)


CASES = {
    "classes": (3, lambda net: dvi.classifier(net, num_data=8), lambda x: torch.arange(8) % 3),
    "noise": (
        1,
        lambda net: dvi.regressor(net, num_data=8, noise_scale=dvi.bayesian.LearnedScale(0.5)),
        lambda x: x[:, 0],
    ),
    "heteroscedastic": (
        4,
        lambda net: dvi.regressor(net, num_data=8, noise_scale=dvi.bayesian.Heteroscedastic()),
        lambda x: x[:, :2],
    ),
}


@pytest.mark.parametrize("covariance", [PerOutput(), AllOutputs(), LowRank(3)], ids=repr)
@pytest.mark.parametrize("case", CASES)
def test_expected_log_likelihood_against_draws(case, covariance):
    """A z-test at 4 deviations with fixed seeds: one false alarm in 16,000. Sobol points add .02 to its error."""
    pyro.set_rng_seed(2)
    num_outputs, wrap, targets = CASES[case]
    model, x = network(num_outputs, wrap), torch.randn(8, 3)
    y = targets(x)
    guide = spread_out(dvi.LastLayerGuide(model, "net.2", covariance=covariance), x, y)
    elbo = dvi.MomentPropagationELBO(estimator=Sobol(1024))
    elbo.loss(model, guide, x, y)
    drawn = likelihood(case, drawn_outputs(guide, x, 20_000)).log_prob(y).sum(-1)
    error = (drawn.std() / len(drawn) ** 0.5).square() + 0.02**2 * (case == "classes")
    assert abs(elbo.terms["log_likelihood"] - drawn.mean()) < 4 * error.sqrt()


@pytest.mark.parametrize("covariance", [PerOutput(), AllOutputs(), LowRank(3)], ids=repr)
def test_the_divergence_is_that_of_torch(covariance):
    model, x = network(2, CASES["classes"][1]), torch.randn(8, 3)
    y = torch.arange(8) % 2
    guide = spread_out(dvi.LastLayerGuide(model, "net.2", covariance=covariance), x, y)
    elbo = dvi.MomentPropagationELBO()
    elbo.loss(model, guide, x, y)
    prior = poutine.trace(model).get_trace(x, y)
    scales = torch.cat(
        [prior.nodes[n]["fn"].base_dist.scale.flatten() for n in ("net.2.weight", "net.2.bias")]
    )
    dense = dense_posterior(guide[1])
    divergence = torch.distributions.kl_divergence(
        dense, torch.distributions.MultivariateNormal(torch.zeros(12), torch.diag(scales.square()))
    )
    points = sum(-prior.nodes[n]["fn"].log_prob(guide[0].median()[n]) for n in ("net.0.weight", "net.0.bias"))
    torch.testing.assert_close(elbo.terms["kl"], (divergence + points).detach())


def dense_posterior(part):
    """The joint Gaussian of a part of a guide as torch's, by its factor."""
    posterior = part.get_posterior()
    if hasattr(posterior, "covariance_matrix"):
        return torch.distributions.MultivariateNormal(posterior.loc, posterior.covariance_matrix)
    size, order = posterior.scale_tril.shape[-1], posterior.order
    same_row = (order[:, None] // size) == (order // size)
    rows = posterior.scale_tril.flatten(0, 1)[order]
    return torch.distributions.MultivariateNormal(posterior.loc, (rows @ rows.T) * same_row)


@pytest.mark.parametrize("covariance", [PerOutput(), AllOutputs(), LowRank(3)], ids=repr)
@pytest.mark.parametrize("case", CASES)
def test_predictions_against_draws(case, covariance):
    """Of 20,000 draws, whose errors are below a quarter of the tolerances."""
    pyro.set_rng_seed(3)
    num_outputs, wrap, targets = CASES[case]
    model, x = network(num_outputs, wrap), torch.randn(8, 3)
    guide = spread_out(dvi.LastLayerGuide(model, "net.2", covariance=covariance), x, targets(x))
    prediction = dvi.predict(model, guide, x, method=dvi.Moments())
    outputs = drawn_outputs(guide, x, 20_000)
    if case == "classes":
        expected = outputs.softmax(-1).mean(0)
        torch.testing.assert_close(prediction.probabilities, expected, rtol=0, atol=0.015)
        return
    drawn = likelihood(case, outputs)
    torch.testing.assert_close(prediction.mean, drawn.mean.mean(0), rtol=0, atol=0.05)
    variance = drawn.mean.var(0) + drawn.variance.mean(0)
    torch.testing.assert_close(prediction.variance, variance, rtol=0.05 if case == "noise" else 0.2, atol=0)


@pytest.mark.parametrize("rest", [dvi.MeanFieldGuide, dvi.MultiplicativeNoiseGuide, AutoDelta])
def test_with_an_uncertain_rest_variances_are_those_of_independent_moments_plus_the_covariances(rest):
    """Of one output: brute force over pairs of weights, with the moments that reach the last layer."""
    pyro.set_rng_seed(4)
    model, x = network(1, CASES["noise"][1]), torch.randn(8, 3)
    guide = spread_out(dvi.LastLayerGuide(model, "net.2", covariance=AllOutputs(), rest=rest), x, x[:, 0])
    prediction = dvi.predict(model, guide, x, method=dvi.Moments())
    hidden = hidden_moments(model, guide, x)
    mean, variance = (
        torch.cat([h, torch.full((8, 1), c)], 1) for h, c in zip(hidden, (1.0, 0.0), strict=True)
    )
    dense = dense_posterior(guide[1])
    second = mean[:, :, None] * mean[:, None] + torch.diag_embed(variance)
    weights = dense.covariance_matrix + dense.loc[:, None] * dense.loc
    expected = (weights * second).sum((1, 2)) - (mean @ dense.loc).square()
    torch.testing.assert_close(prediction.variance, (expected + 0.25).detach())


def hidden_moments(model, guide, x):
    """Mean and variance of the hidden units, from the same guide of the rest by a model that ends there."""
    posterior = guide[0].median()
    quantiles = None if isinstance(guide[0], AutoDelta) else guide[0].quantiles([0.8413447460685429])
    spread = {
        n: (0 * posterior[n] if quantiles is None else quantiles[n][0] - posterior[n]) for n in posterior
    }
    w, b = (
        dvi.moments.GaussianMoments(posterior[n], spread[n].square()) for n in ("net.0.weight", "net.0.bias")
    )
    hidden = torch.tanh(F.linear(x, w, b))
    return hidden.loc, hidden.variance


def test_equal_to_a_mean_field_guide_without_covariances():
    """A dense guide at its start has none, and the loss of a mean-field layer."""
    losses = []
    for covariance in (PerOutput(), AllOutputs(), MeanField()):
        pyro.clear_param_store()
        model, x = (
            network(3, CASES["noise"][1]),
            torch.randn(8, 3, generator=torch.Generator().manual_seed(0)),
        )
        y = x[:, :1].expand(-1, 3)
        guide = dvi.LastLayerGuide(model, "net.2", covariance=covariance, rest=dvi.MeanFieldGuide)
        losses.append(dvi.MomentPropagationELBO().loss(model, guide, x, y))
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-9)


# What is refused ------------------------------------------------------------------------------------------------


def guided(model, *args, make=AutoMultivariateNormal):
    guide = make(model)
    return lambda elbo: elbo.loss(model, guide, *args)


def test_other_objectives_refuse_covariances(data):
    loss = guided(linear, *data)
    with pytest.raises(
        GuideError, match=r"MultivariateNormal, which is not a factorised Gaussian.*last layer"
    ):
        loss(dvi.TaylorELBO())
    with pytest.raises(GuideError, match="NaturalGradientGuide, got AutoMultivariateNormal"):
        loss(dvi.NaturalGradientELBO())


def two_layers(x, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([4, 3]).to_event(2))
    v = pyro.sample("v", dist.Normal(0.0, 1.0).expand([1, 4]).to_event(2))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(F.linear(torch.relu(F.linear(x, w)), v)[:, 0], NOISE), obs=y)


def summed_outputs(x, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([4, 3]).to_event(2))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(F.linear(x, w).sum(-1), NOISE), obs=y)


def squared_weights(x, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([1, 3]).to_event(2))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(F.linear(x, w * w)[:, 0], NOISE), obs=y)


@pytest.mark.parametrize("model", [two_layers, summed_outputs, squared_weights])
def test_weights_that_are_not_those_of_a_last_layer_are_refused(data, model):
    loss = guided(model, *data)
    for _ in range(2):  # not in the first step only
        with pytest.raises(
            UnsupportedError, match=r"'w'.* has covariances.*last linear layer.*LastLayerGuide"
        ):
            loss(dvi.MomentPropagationELBO())


def test_a_likelihood_that_knows_no_covariances_is_refused(data):
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2, 3]).to_event(2))
        with pyro.plate("data", len(x)):
            f = F.linear(x, w)
            return pyro.sample("y", dist.Laplace(f[:, 0], torch.exp(f[:, 1])), obs=y)

    with pytest.raises(UnsupportedError, match=r"Laplace\(loc, scale\).*PerOutput"):
        guided(model, *data)(dvi.MomentPropagationELBO())
    per_output = guided(model, *data, make=lambda m: dvi.LastLayerGuide(m, "w"))
    assert math.isfinite(per_output(dvi.MomentPropagationELBO()))


def test_the_tilted_bound_is_refused_for_dependent_logits():
    model, x = network(3, CASES["classes"][1]), torch.randn(8, 3)
    guide = dvi.LastLayerGuide(model, "net.2", covariance=AllOutputs())
    with pytest.raises(UnsupportedError, match=r"TiltedBound\(\).*Sobol"):
        dvi.MomentPropagationELBO(estimator=TiltedBound()).loss(model, guide, x, torch.arange(8) % 3)


def test_constrained_sites_and_parents_of_priors_are_refused(data):
    def noisy(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([1, 3]).to_event(2))
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(F.linear(x, w)[:, 0], scale), obs=y)

    def hierarchical(x, y=None):
        centre = pyro.sample("centre", dist.Normal(0.0, 1.0))
        w = pyro.sample("w", dist.Normal(centre, 1.0).expand([1, 3]).to_event(2))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(F.linear(x, w)[:, 0], 1.0), obs=y)

    with pytest.raises(GuideError, match=r"'scale' has covariances.*is constrained"):
        guided(noisy, *data)(dvi.MomentPropagationELBO())
    with pytest.raises(GuideError, match=r"covariances.*sets the prior"):
        guided(hierarchical, *data)(dvi.MomentPropagationELBO())


def test_one_scaled_site_of_a_joint_posterior_is_refused(data):
    def model(x, y=None):
        with poutine.scale(scale=0.5):
            w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([1, 3]).to_event(2))
        b = pyro.sample("b", dist.Normal(0.0, 1.0).expand([1]).to_event(1))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(F.linear(x, w, b)[:, 0], NOISE), obs=y)

    with pytest.raises(ModelError, match=r"'w', 'b'.*covariances.*scaled"):
        guided(model, *data)(dvi.MomentPropagationELBO())


def test_predictions_that_take_weights_as_independent_are_refused(data):
    guide = AutoMultivariateNormal(linear)
    guide(*data)
    with pytest.raises(UnsupportedError, match="has covariances"):
        dvi.predict(linear, guide, data[0], method=dvi.Moments(propagation=dvi.ReverseDelta()))


# With the rest of the library ------------------------------------------------------------------------------------


def test_pyros_guides_over_the_last_layer_beside_ours(data):
    model, x = network(3, CASES["classes"][1]), torch.randn(8, 3)
    y = torch.arange(8) % 3

    def last(site):
        return site["name"].startswith("net.2")

    for make in (AutoMultivariateNormal, AutoLowRankMultivariateNormal):
        pyro.clear_param_store()
        guide = AutoGuideList(model)
        guide.append(dvi.MultiplicativeNoiseGuide(poutine.block(model, hide_fn=last)))
        guide.append(make(poutine.block(model, hide_fn=lambda site: not last(site))))
        svi = SVI(model, guide, dvi.optim.Adam({"lr": 0.01}), dvi.MomentPropagationELBO())
        losses = [svi.step(x, y) for _ in range(20)]
        assert losses[-1] < losses[0]
        assert dvi.predict(model, guide, x).probabilities.shape == (8, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fit_predict_and_export(dtype):
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    model, x = dvi.classifier(dvi.to_bayesian_(net), num_data=8), torch.randn(8, 3, dtype=dtype)
    y = torch.arange(8) % 3
    guide = dvi.LastLayerGuide(model, "net.2")
    svi = SVI(model, guide, dvi.optim.Adam({"lr": 0.01}), dvi.MomentPropagationELBO())
    dvi.fit(svi, [(x, y)], 3, progress=False)
    prediction = dvi.predict(model, guide, x)
    assert prediction.probabilities.dtype == dtype
    found = dvi.to_arviz(model, guide, (x, y), 10)
    assert found.posterior["net.2.weight"].shape == (1, 10, 3, 5)
