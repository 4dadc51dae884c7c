# SPDX-License-Identifier: Apache-2.0
"""Scales that follow the evidence while the mode is trained."""

import math
from types import SimpleNamespace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from torch import Tensor, nn

import pyro_dvi as dvi
from pyro_dvi.errors import ArgumentError, DataError
from pyro_dvi.laplace import (
    Dense,
    KroneckerFactored,
    LaplaceGuide,
    NoiseScale,
    OnlineEvidence,
    PriorPrecision,
)
from tests.laplace.problems import LinearRegression

BOTH = (PriorPrecision(), NoiseScale())


def mistaken() -> LinearRegression:
    """A regression whose model has another noise and prior than the data."""
    problem = LinearRegression()
    problem.noise, problem.prior_scale = 0.9, 2.5
    return problem


def best_evidence(problem: LinearRegression) -> tuple[float, float, float]:
    """The largest evidence in closed form, and its prior precision and noise relative to those of the model."""
    logs = torch.zeros(2, dtype=torch.float64, requires_grad=True)

    def negative() -> Tensor:
        precision, noise = logs.exp()
        covariance = problem.prior_scale**2 / precision * problem.x @ problem.x.T
        covariance = covariance + (noise * problem.noise) ** 2 * torch.eye(len(problem.y))
        return -dist.MultivariateNormal(torch.zeros_like(problem.y), covariance).log_prob(problem.y)

    optimizer = torch.optim.LBFGS([logs], max_iter=200, line_search_fn="strong_wolfe", tolerance_grad=1e-10)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = negative()
        loss.backward()
        return loss

    optimizer.step(closure)
    precision, noise = logs.detach().exp().tolist()
    return -negative().item(), precision, noise


def test_mode_and_scales_together_reach_the_largest_evidence_of_a_linear_model():
    """With exact minima between choices the fixed point is the optimum, as the mode has no slope there."""
    problem = mistaken()
    guide = problem.guide()
    online = OnlineEvidence(guide, problem.batches, BOTH, method=Dense(), every=1)
    for epoch in range(1, 6):
        online(SimpleNamespace(epoch=epoch, model=online.model))
        guide.polish(problem.batches, progress=False)
    value, precision, noise = best_evidence(problem)
    assert guide.log_evidence(problem.batches).value == pytest.approx(
        value, abs=2e-3
    )  # of the search between values
    assert online.values[-1][PriorPrecision()] == pytest.approx(precision, rel=0.1)
    assert online.values[-1][NoiseScale()] == pytest.approx(noise, rel=0.05)
    assert abs(math.log(precision)) > 0.5 and abs(math.log(noise)) > 0.5  # there was something to find


@pytest.mark.slow
def test_training_is_that_of_the_scales_that_were_chosen():
    problem = mistaken()
    pyro.clear_param_store()
    guide = LaplaceGuide(problem.model)
    online = OnlineEvidence(guide, problem.batches, BOTH, method=Dense(), every=25)
    svi = SVI(online.model, guide, pyro.optim.ClippedAdam({"lr": 0.1, "lrd": 0.98}), Trace_ELBO())
    dvi.fit(svi, [(problem.x, problem.y)], epochs=200, callbacks=[online], progress=False)
    assert len(online.values) == 8 and guide.posterior is None
    scales = guide.scale_factors
    noise, prior = scales["y"] * problem.noise, scales["weight"] * problem.prior_scale
    ridge = problem.x.T @ problem.x / noise**2 + torch.eye(3) / prior**2
    mode = torch.linalg.solve(ridge, problem.x.T @ problem.y / noise**2)
    torch.testing.assert_close(guide.unconstrained_mode()["weight"], mode, rtol=0.02, atol=0.02)
    value, _, _ = best_evidence(problem)
    assert guide.log_evidence(problem.batches).value == pytest.approx(value, abs=0.02)


@pytest.mark.slow
def test_a_network_ends_with_more_evidence_than_with_the_prior_as_it_was_written():
    """Inputs of which one in ten matters, a prior for each layer, Kronecker factors."""
    torch.manual_seed(0)
    x = torch.randn(80, 5, dtype=torch.float64)
    y = torch.tanh(2 * x[:, :1]) + 0.1 * torch.randn(80, 1, dtype=torch.float64)

    def evidence(online: bool) -> float:
        pyro.clear_param_store()
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        model = dvi.regressor(dvi.to_bayesian_(net, prior_scale=1.0), num_data=80, noise_scale=0.3)
        guide = LaplaceGuide(model)
        scales = (PriorPrecision("net.0.*"), PriorPrecision("net.2.*"), NoiseScale())
        callback = OnlineEvidence(guide, [(x, y)], scales, method=KroneckerFactored(), every=40)
        svi = SVI(callback.model, guide, pyro.optim.Adam({"lr": 0.02}), Trace_ELBO())
        dvi.fit(svi, [(x, y)], epochs=120, callbacks=[callback] if online else [], progress=False)
        assert (len(callback.values) == 3) == online
        return guide.log_evidence([(x, y)]).value

    assert evidence(online=True) > evidence(online=False) + 20


def test_mistakes_are_named():
    problem = LinearRegression()
    online = OnlineEvidence(problem.guide(), problem.batches)
    with pytest.raises(ArgumentError, match=r"SVI\(online.model"):
        online(SimpleNamespace(epoch=10, model=problem.model))
    for wrong, message in (
        ({"every": 0}, "every"),
        ({"scales": ["w"]}, "scales"),
        ({"method": Dense}, "class Dense"),
    ):
        with pytest.raises(ArgumentError, match=message):
            OnlineEvidence(problem.guide(), problem.batches, **wrong)
    with pytest.raises(DataError, match="ends after one pass"):
        OnlineEvidence(problem.guide(), iter(problem.batches))
