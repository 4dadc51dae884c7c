# SPDX-License-Identifier: Apache-2.0
"""The log evidence, against closed forms of linear regression."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_dvi.errors import (
    ArgumentError,
    NotPositiveDefiniteError,
)
from pyro_dvi.laplace import (
    GGN,
    ByLanczos,
    ConjugateGradient,
    Dense,
    Diagonal,
    Hessian,
)
from tests.laplace.problems import LinearRegression, SineRegression, guide_at

QUIET = {"progress": False}


@pytest.mark.parametrize("curvature", [GGN(), Hessian()])
def test_evidence_of_linear_regression_is_exact(curvature):
    problem = LinearRegression()
    guide = problem.guide()
    guide.fit(problem.batches, Dense(curvature))
    found = guide.log_evidence(problem.batches)
    assert found.value == pytest.approx(problem.log_evidence(), abs=1e-9)
    assert found.standard_error == 0 and found.determinant == "DensePosterior"
    assert "log evidence" in str(found)


def test_evidence_needs_no_fit():
    problem = LinearRegression()
    assert problem.guide().log_evidence(problem.batches).value == pytest.approx(
        problem.log_evidence(), abs=1e-9
    )


def test_stochastic_evidence_is_within_its_error():
    problem = LinearRegression(num_data=60, num_features=40)
    guide = problem.guide()
    found = guide.log_evidence(problem.batches, determinant=ByLanczos(num_probes=32, steps=40, seed=1))
    assert 0 < found.standard_error < 2
    # One seed at four standard errors: a correct estimate fails once in 16,000 seeds.
    assert abs(found.value - problem.log_evidence()) < 4 * found.standard_error


def test_evidence_of_a_method_is_that_of_its_approximation():
    problem = LinearRegression()
    guide = problem.guide()
    guide.fit(problem.batches, Diagonal())
    found = guide.log_evidence(problem.batches)
    expected = float(problem.precision().diagonal().log().sum())
    assert found.log_determinant == pytest.approx(expected, rel=1e-9)
    assert found.determinant == "DiagonalPosterior"


def test_subset_is_given_the_sites_that_stay():
    problem = SineRegression(hidden=4)
    guide = problem.trained(300)
    guide.polish(problem.batches, subset=["w2", "b2"], **QUIET)
    found = guide.log_evidence(problem.batches, subset=["w2", "b2"])
    # The last layer is a linear regression on the hidden units.
    mode = guide.unconstrained_mode()
    h = torch.tanh(problem.x @ mode["w1"] + mode["b1"]) / math.sqrt(4)
    design = torch.cat([h, torch.ones_like(h[:, :1])], -1)
    covariance = design @ design.T + problem.noise**2 * torch.eye(len(design), dtype=torch.float64)
    exact = dist.MultivariateNormal(torch.zeros(len(design), dtype=torch.float64), covariance).log_prob(
        problem.y
    )
    assert found.value == pytest.approx(float(exact), abs=1e-7)
    assert found.size == 5


def hierarchical(x, y=None):
    scale = pyro.sample("scale", dist.LogNormal(x.new_zeros(()), 0.5))
    w = pyro.sample("w", dist.Normal(x.new_zeros(()), scale).expand([x.shape[1]]).to_event(1))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)


def test_prior_of_fixed_sites_counts_where_it_depends_on_what_varies():
    problem = LinearRegression()
    guide = guide_at(hierarchical, (problem.x, problem.y), {"scale": torch.zeros(()), "w": problem.mode()})
    found = guide.log_evidence([(problem.x, problem.y)], subset="w")
    weight = dist.Normal(torch.zeros((), dtype=torch.float64), 1.0).log_prob(problem.mode()).sum()
    assert found.log_prior == pytest.approx(float(weight), abs=1e-6)
    found = guide.log_evidence([(problem.x, problem.y)], subset="scale")
    standard_normal = -0.5 * math.log(2 * math.pi) - math.log(0.5)  # of log scale = 0
    assert found.log_prior == pytest.approx(float(weight) + standard_normal, abs=1e-5)


def test_tempered_posterior_has_no_evidence():
    problem = LinearRegression()
    guide = guide_at(problem.model, problem.batches[0], {"weight": problem.mode()}, kl_weight=0.5)
    with pytest.raises(ArgumentError, match="tempered.*ByValidation"):
        guide.log_evidence(problem.batches)


def test_evidence_at_a_saddle_is_refused():
    problem = SineRegression(hidden=10)
    guide = problem.trained(5)
    guide.fit(problem.batches, ConjugateGradient(precision=Hessian()), unconverged="accept")
    with pytest.raises(NotPositiveDefiniteError, match="polish"):
        guide.log_evidence(problem.batches)
