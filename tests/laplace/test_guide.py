# SPDX-License-Identifier: Apache-2.0
"""LaplaceGuide as a Pyro guide: training and draws."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import optim
from pyro.infer import SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO

import pyro_dvi as dvi
from pyro_dvi import LaplaceGuide, MomentPropagationELBO, Samples, TaylorELBO, predict
from pyro_dvi.errors import (
    DviWarning,
    GuideError,
    UnsupportedError,
)
from pyro_dvi.laplace import (
    Dense,
    Hessian,
)
from tests.laplace.problems import LinearRegression, guide_at
from tests.laplace.slope import LOCS, PointSolver, X, Y, fitted, model

# Training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "loss",
    [
        lambda k: Trace_ELBO(),
        lambda k: TraceMeanField_ELBO(),
        lambda k: TaylorELBO(kl_weight=k),
        lambda k: MomentPropagationELBO(kl_weight=k),
    ],
    ids=["Trace_ELBO", "TraceMeanField_ELBO", "TaylorELBO", "MomentPropagationELBO"],
)
@pytest.mark.parametrize("kl_weight", [1.0, 0.3])
def test_every_elbo_has_the_gradient_of_the_energy(loss, kl_weight):
    elbo = loss(kl_weight)
    if kl_weight != 1 and isinstance(elbo, Trace_ELBO):
        pytest.skip("Pyro's objectives have no such weight")
    guide = guide_at(model, (X, Y), LOCS, kl_weight=kl_weight)
    locs = list(guide.parameters())
    elbo.differentiable_loss(model, guide, X, Y).backward()
    gradient = torch.stack([loc.grad for loc in locs])
    energy = guide.energy([(X, Y)])
    expected = kl_weight * energy.at(energy.start).gradient
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-6)


def test_the_kl_weight_is_that_of_training_unless_given():
    problem = LinearRegression()
    given, learned = LaplaceGuide(problem.model, kl_weight=0.5), LaplaceGuide(problem.model)
    for guide in (given, learned):
        pyro.clear_param_store()
        svi = SVI(problem.model, guide, optim.Adam({"lr": 0.1}), TaylorELBO(kl_weight=0.1))
        dvi.fit(svi, [(problem.x, problem.y)], epochs=1)
    assert (given.kl_weight, learned.kl_weight) == (0.5, 0.1)
    again = LaplaceGuide(problem.model)
    again.load_state_dict(learned.state_dict())
    assert again.kl_weight == 0.1
    svi = SVI(problem.model, learned, optim.Adam({"lr": 0.1}), Trace_ELBO())
    svi.step(problem.x, problem.y)
    assert learned.kl_weight == 0.1  # Pyro's objectives have none to read


def test_training_finds_the_mode_of_a_linear_regression():
    problem = LinearRegression()
    guide = LaplaceGuide(problem.model)
    svi = SVI(problem.model, guide, optim.Adam({"lr": 0.1}), Trace_ELBO())
    dvi.fit(svi, [(problem.x, problem.y)], epochs=150)
    torch.testing.assert_close(guide.median()["weight"], problem.mode(), rtol=0, atol=0.02)


def test_a_trained_network_is_a_mode_already():
    net = torch.nn.Sequential(torch.nn.Linear(1, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()
    weight = net[0].weight.detach().clone()
    bayesian = dvi.regressor(dvi.to_bayesian_(net), num_data=10, noise_scale=0.3)
    guide = LaplaceGuide(bayesian)
    guide.initialize(X[:, None], Y[:, None])
    found = {name: value for name, value in guide.median().items() if name.endswith("0.weight")}
    torch.testing.assert_close(next(iter(found.values())), weight)
    guide.fit([(X[:, None], Y[:, None])], Dense(), unconverged="accept")
    assert (predict(bayesian, guide, X[:, None]).variance > 0).all()


def test_training_goes_on_after_a_fit():
    guide = fitted()
    svi = SVI(model, guide, optim.SGD({"lr": 1e-3}), Trace_ELBO())
    svi.step(X, Y)  # at the mode, without a warning of draws
    with pytest.raises(GuideError, match="has moved since guide.fit"):
        guide.predictive(X)
    with pytest.raises(GuideError, match="moved"):
        guide.sample()
    with pytest.warns(DviWarning, match="point mass until it is fitted again"):
        drawn = Predictive(model, guide=guide, num_samples=2)(X)
    torch.testing.assert_close(drawn["slope"].reshape(-1), guide.median()["slope"].expand(2))


# Reading the posterior --------------------------------------------------------------------------------------------


def test_before_the_fit_it_is_a_point_mass():
    guide = guide_at(model, (X, Y), LOCS)
    drawn = guide.sample(3)
    torch.testing.assert_close(drawn["scale"], LOCS["scale"].exp().expand(3))
    predictive = Predictive(model, guide=guide, num_samples=4)(X)
    assert (predictive["slope"] == LOCS["slope"]).all()
    assert guide.posterior is None


def test_draws_are_those_of_the_gaussian():
    guide = fitted()
    covariance = torch.linalg.inv(guide.posterior.precision)
    drawn = guide.sample((40, 500))
    assert drawn["slope"].shape == (40, 500)
    flat = torch.stack([drawn["slope"].flatten(), drawn["scale"].log().flatten()])
    torch.testing.assert_close(
        flat.cov(), covariance, rtol=0.06, atol=0.06 * covariance.diagonal().prod().sqrt()
    )
    pyro.set_rng_seed(0)
    first = guide.sample()
    pyro.set_rng_seed(0)
    assert torch.equal(guide.sample()["slope"], first["slope"])


def test_median_and_quantiles():
    guide = fitted()
    deviation = torch.linalg.inv(guide.posterior.precision).diagonal().sqrt()
    assert torch.equal(guide.median()["scale"], LOCS["scale"].exp())
    levels = torch.tensor([0.1, 0.5, 0.9]).double()
    found = guide.quantiles([0.1, 0.5, 0.9])
    z = dist.Normal(0.0, 1.0).icdf(levels)
    torch.testing.assert_close(found["slope"], LOCS["slope"] + deviation[0] * z)
    torch.testing.assert_close(found["scale"], (LOCS["scale"] + deviation[1] * z).exp())
    torch.testing.assert_close(guide.get_posterior()["slope"].stddev, deviation[0])


def test_sites_outside_the_subset_stay_at_their_mode():
    guide = fitted(subset="slope")
    drawn = guide.sample(5)
    assert drawn["slope"].std() > 0
    assert torch.equal(drawn["scale"], LOCS["scale"].exp().expand(5))
    assert torch.equal(guide.quantiles([0.1])["scale"], LOCS["scale"].exp().expand(1))
    with pytest.warns(DviWarning, match="drawn"):
        predictive = Predictive(model, guide=guide, num_samples=3)(X)
    assert torch.equal(predictive["scale"].flatten(), LOCS["scale"].exp().expand(3))


@pytest.mark.parametrize("parallel", [False, True])
def test_predictive_warns_and_draws(parallel):
    guide = fitted()
    with pytest.warns(DviWarning, match=r"Linearised\(\)"):
        found = Predictive(model, guide=guide, num_samples=600, parallel=parallel)(X)
    slope, scale = found["slope"].flatten(), found["scale"].flatten()
    covariance = torch.linalg.inv(guide.posterior.precision)
    assert len(slope) == 600
    torch.testing.assert_close(torch.stack([slope, scale.log()]).cov(), covariance, rtol=0.3, atol=0.004)
    assert found["y"].shape[-1] == 10


def test_samples_rule_warns_and_averages_draws():
    guide = fitted()
    with pytest.warns(DviWarning, match="drawn"):
        found = predict(model, guide, (X, Y), Samples(100), seed=1, batch_size=5)
    # The model is linear in the slope: draws lead to the same mean and variance, up to their noise.
    linearised = predict(model, guide, (X, Y))
    torch.testing.assert_close(found.mean, linearised.mean, rtol=0, atol=0.05)
    torch.testing.assert_close(found.log_likelihood(), linearised.log_likelihood(), rtol=0, atol=0.1)


def test_losses_of_draws_are_refused():
    guide = fitted()
    svi = SVI(model, guide, optim.SGD({"lr": 1e-3}), Trace_ELBO())
    with (
        pytest.warns(DviWarning),
        pytest.raises(UnsupportedError, match="after guide.fit: compute losses before it"),
    ):
        svi.evaluate_loss(X, Y)


def test_a_method_without_draws_says_so():
    guide = guide_at(model, (X, Y), LOCS)
    guide.fit([(X, Y)], PointSolver(), unconverged="accept")
    with pytest.raises(UnsupportedError, match="PosteriorSamples"):
        guide.sample()
    with pytest.raises(UnsupportedError, match="variances of single latents"):
        guide.quantiles([0.5])
    with pytest.raises(UnsupportedError, match="joint"):
        guide.predictive(X, joint=True)
    assert torch.equal(guide.median()["slope"], LOCS["slope"])
    assert "nll" in predict(model, guide, (X, Y)).metrics()


def test_export_to_arviz():
    pytest.importorskip("arviz")
    guide = fitted()
    with warnings.catch_warnings():
        warnings.simplefilter("error", DviWarning)  # draws that are only exported predict nothing
        data = dvi.to_arviz(model, guide, (X, Y), num_samples=200, seed=0)
    assert data["posterior"]["slope"].shape == (1, 200)
    deviation = torch.linalg.inv(guide.posterior.precision)[0, 0].sqrt().item()
    assert float(data["posterior"]["slope"].std()) == pytest.approx(deviation, rel=0.25)
    assert data["posterior_predictive"]["y"].shape == (1, 200, 10)
    assert "log_likelihood" in data
    pyro.clear_param_store()
    solver = guide_at(model, (X, Y), LOCS)
    solver.fit([(X, Y)], PointSolver(), unconverged="accept")
    assert "posterior" not in dvi.to_arviz(model, solver, (X, Y), num_samples=5, sites=[])


@pytest.mark.parametrize("batch", [(X, Y), {"x": X, "y": Y}], ids=["tuple", "mapping"])
def test_the_first_batch_shows_the_model(batch):
    guide = LaplaceGuide(model)
    assert guide.polish([batch], progress=False).converged
    assert guide.fit([batch], Dense(Hessian())).mode.shape == (2,)


def test_print_says_what_the_guide_has():
    guide = LaplaceGuide(model)
    assert "not initialised" in repr(guide)
    guide.initialize(X, Y)
    assert "mode of 2 latents, not known to be a minimum; no Gaussian yet" in repr(guide)
    guide.polish([(X, Y)], progress=False)
    guide.fit([(X, Y)], Dense(), subset="slope")
    whole = "LaplaceGuide(mode of 2 latents, a minimum; <DensePosterior of 1 latents>, precision GGN)"
    assert repr(guide) == whole
    with torch.no_grad():
        guide.locs.slope.add_(0.1)
    assert "not known to be a minimum; <DensePosterior" in repr(guide) and "has moved since" in repr(guide)
    guide.polish([(X, Y)], subset="slope", progress=False)
    assert "a minimum in 1 of 2 sites" in repr(guide)
    guide.scale_factors = {"slope": 0.25, "y": 1.5}
    assert "; scale_factors 0.25, 1.5; " in repr(guide)
