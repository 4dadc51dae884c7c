# SPDX-License-Identifier: Apache-2.0
"""Runs, fits and eigenvectors that serve several scales, against models and fits of their own."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_dvi as dvi
from pyro_dvi.laplace import ByEvidence, ByValidation, Dense, LaplaceGuide, NoiseScale, PriorPrecision
from pyro_dvi.laplace.energy.energy import Energy
from pyro_dvi.laplace.evidence.candidates import Candidates, FirstFit
from pyro_dvi.runs.log_joint import rescaled_model

X = torch.linspace(-1, 1, 24, dtype=torch.float64)[:, None]
Y = torch.sin(3 * X)
BATCHES = [(X[:10], Y[:10]), (X[10:], Y[10:])]


def fitted_network(outputs=1):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
    return dvi.to_bayesian_(net, 0.7)


def constrained(x, y=None):
    """A latent with a transform, and a prior that depends on it."""
    width = pyro.sample("width", dist.LogNormal(x.new_zeros(()), 0.5))
    slope = pyro.sample("slope", dist.Normal(x.new_zeros(()), width))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(slope * x[:, 0], 0.3), obs=y)


@pytest.mark.parametrize("factors", [{"net.0.weight": 0.3, "obs": 2.0}, {"net.2.bias": 5.0}, {}])
def test_factors_are_those_of_the_rescaled_model(factors):
    model = dvi.regressor(fitted_network(), num_data=24, noise_scale=0.3)
    guide = LaplaceGuide(model)
    whole = guide.energy(BATCHES)
    assert torch.isfinite(whole.at(whole.start).value)
    calls = []
    model.net.register_forward_hook(lambda *_: calls.append(1))
    shared = whole.with_factors(factors)
    found, vector = shared.at(shared.start), torch.randn(1, 13, dtype=torch.float64)
    results = [found.value, found.gradient, found.hessian(vector), found.ggn(vector), found.log_likelihood]
    assert not calls
    own = Energy(rescaled_model(model, factors), BATCHES, whole.locs).at(whole.start)
    expected = [own.value, own.gradient, own.hessian(vector), own.ggn(vector), own.log_likelihood]
    for result, value in zip(results, expected, strict=True):
        torch.testing.assert_close(result, value, rtol=1e-10, atol=1e-10)
    assert calls  # of the last energy


def test_factors_of_latents_on_which_priors_depend():
    locs = {"width": torch.tensor(0.2).double(), "slope": torch.tensor(0.9).double()}
    batches, factors = [(X, Y[:, 0])], {"slope": 3.0, "y": 0.5}
    whole = Energy(constrained, batches, locs)
    shared = whole.with_factors(factors)
    found = shared.at(shared.start)
    own = Energy(rescaled_model(constrained, factors), batches, locs).at(whole.start)
    torch.testing.assert_close(found.value, own.value)
    torch.testing.assert_close(found.hessian(torch.eye(2).double()), own.hessian(torch.eye(2).double()))


@pytest.mark.parametrize("likelihood", [1.0, 0.2])
@pytest.mark.parametrize("prior", [1e-3, 1.0, 50.0])
def test_eigenvectors_serve_all_factors(likelihood, prior):
    guide = LaplaceGuide(dvi.classifier(fitted_network(3), num_data=24))
    data = [(X, (Y[:, 0] > 0).long())]
    guide.fit(data, Dense(), unconverged="accept", progress=False)
    dense = guide.posterior
    wanted = dense.reweighted(likelihood, prior * dense.prior)
    found = dense.for_tuning().reweighted(likelihood, prior * dense.prior)
    query = guide.query(X[:5])
    torch.testing.assert_close(found.covariance(query), wanted.covariance(query), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(
        found.joint_covariance(query), wanted.joint_covariance(query), rtol=1e-8, atol=1e-10
    )
    torch.testing.assert_close(found.marginal_variance(), wanted.marginal_variance(), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(found.log_determinant(), wanted.log_determinant(), rtol=1e-8, atol=1e-8)
    vectors = torch.randn(2, len(dense.mode), dtype=torch.float64)
    torch.testing.assert_close(found.solve(vectors), wanted.solve(vectors), rtol=1e-8, atol=1e-10)
    uneven = dense.prior * torch.linspace(1, 2, len(dense.prior)).double()
    assert dense.for_tuning().reweighted(1.0, uneven) is None


@pytest.mark.parametrize("criterion", [ByEvidence(), ByValidation([(X[::3], Y[::3])])])
@pytest.mark.parametrize("scale", [PriorPrecision(), PriorPrecision("net.0.*"), NoiseScale()])
def test_scores_are_those_of_fits_of_their_own(scale, criterion):
    guide = LaplaceGuide(dvi.regressor(fitted_network(), num_data=24, noise_scale=0.3))
    whole = guide.energy(BATCHES)
    others = whole.with_factors({"obs": 1.5} if scale.of_prior else {"net.2.weight": 0.4})
    sites = scale.sites(whole)
    shared = criterion.score(Candidates(others, scale, sites, FirstFit(whole, Dense(), 0)))
    for value in (0.3, 1.0, 4.0):
        factors = {**others.scale_factors, **dict.fromkeys(sites, scale.factor(value))}
        own = Energy(rescaled_model(guide._plain_model.get(), factors), BATCHES, whole.locs)
        expected = criterion.score(Candidates(own, scale, sites, FirstFit(own, Dense(), 0)))(1.0)
        assert shared(value) == pytest.approx(expected, rel=1e-6)
