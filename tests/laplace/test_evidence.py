"""The log evidence and what is tuned by it, against closed forms of linear regression."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_dvi import predict
from pyro_dvi.errors import (
    ArgumentError,
    DviWarning,
    GuideError,
    ModelError,
    NotPositiveDefiniteError,
    UnsupportedError,
)
from pyro_dvi.guides.laplace import (
    GGN,
    Accept,
    ByEvidence,
    ByLanczos,
    ConjugateGradient,
    Dense,
    Diagonal,
    Exactly,
    Hessian,
    NoiseScale,
    PriorPrecision,
)
from pyro_dvi.predictive import ByValidation, Linearised
from tests.laplace.problems import LinearRegression, SineRegression, guide_at

QUIET = {"progress": False}


# --- evidence --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("curvature", [GGN(), Hessian()])
def test_evidence_of_linear_regression_is_exact(curvature):
    problem = LinearRegression()
    guide = problem.guide()
    guide.fit(problem.batches, Dense(curvature))
    found = guide.log_evidence(problem.batches)
    assert found.value == pytest.approx(problem.log_evidence(), abs=1e-9)
    assert found.standard_error == 0 and found.determinant == "DensePosterior"
    assert guide.log_evidence(problem.batches, determinant=Exactly()).value == pytest.approx(
        found.value, abs=1e-9
    )
    assert "log evidence" in str(found)


def test_evidence_needs_no_fit():
    problem = LinearRegression()
    assert problem.guide().log_evidence(problem.batches).value == pytest.approx(
        problem.log_evidence(), abs=1e-9
    )


def test_stochastic_evidence_is_within_its_error():
    problem = LinearRegression(num_data=60, num_features=40)
    guide = problem.guide()
    found = guide.log_evidence(problem.batches, determinant=ByLanczos(probes=32, steps=40, seed=1))
    assert 0 < found.standard_error < 2
    # One seed at four standard errors: a correct estimate fails once in 16,000 seeds.
    assert abs(found.value - problem.log_evidence()) < 4 * found.standard_error


def test_probes_one_after_the_other_agree(monkeypatch):
    problem = LinearRegression(num_data=60, num_features=40)
    monkeypatch.setattr("pyro_dvi.guides.laplace.spectrum._BASIS_BYTES", 1)
    found = problem.guide().log_evidence(problem.batches, determinant=ByLanczos(probes=8, steps=20, seed=1))
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
    with pytest.raises(ArgumentError, match="kl_weight=1.*ByValidation"):
        guide.log_evidence(problem.batches)


def test_large_matrices_are_not_decomposed():
    problem = LinearRegression()
    with pytest.raises(ArgumentError, match="3 x 3.*ByLanczos"):
        problem.guide().log_evidence(problem.batches, determinant=Exactly(max_size=2))


def test_evidence_at_a_saddle_is_refused():
    problem = SineRegression(hidden=10)
    guide = problem.trained(5)
    guide.fit(problem.batches, ConjugateGradient(curvature=Hessian()), unconverged=Accept())
    with pytest.raises(NotPositiveDefiniteError, match="polish"):
        guide.log_evidence(problem.batches)


# --- tuning ----------------------------------------------------------------------------------------------------------


def evidence_at_fixed_mode(problem, prior=1.0, noise=1.0):
    """Log p(D | mode) + log p_c(mode) + D/2 log 2 pi - 1/2 log det P_c, written out."""
    mode = problem.mode()
    sigma, scale = noise * problem.noise, problem.prior_scale * prior**-0.5
    fit = dist.Normal(problem.x @ mode, sigma).log_prob(problem.y).sum()
    log_prior = dist.Normal(torch.zeros((), dtype=torch.float64), scale).log_prob(mode).sum()
    precision = problem.x.T @ problem.x / sigma**2 + torch.eye(len(mode), dtype=torch.float64) / scale**2
    return float(fit + log_prior + len(mode) / 2 * math.log(2 * math.pi) - 0.5 * torch.logdet(precision))


def maximum(function, low=-7.0, high=7.0, count=4001):
    """Where a function of the logarithm is largest, by brute force and a parabola."""
    grid = torch.linspace(low, high, count, dtype=torch.float64)
    values = torch.tensor([function(math.exp(float(t))) for t in grid], dtype=torch.float64)
    i = int(values.argmax())
    a, b, c = values[i - 1], values[i], values[i + 1]
    return math.exp(float(grid[i] + 0.5 * (a - c) / (a - 2 * b + c) * (grid[1] - grid[0])))


@pytest.mark.parametrize("determinant", [None, ByLanczos(probes=2, steps=3)])
def test_prior_precision_by_evidence(determinant):
    # Of orthogonal features a Rademacher probe has no error, so that the stochastic determinant is exact as well.
    problem = LinearRegression(num_data=20)
    problem.x = torch.linalg.qr(problem.x).Q * 4
    guide = problem.guide()
    curve = guide.tune(problem.batches, criterion=ByEvidence(determinant), refinements=25, **QUIET)
    assert curve.best == pytest.approx(maximum(lambda c: evidence_at_fixed_mode(problem, prior=c)), rel=1e-3)
    assert not curve.at_edge and "best" in str(curve)
    for value, score in zip(curve.values.tolist(), curve.scores.tolist(), strict=True):
        assert score == pytest.approx(evidence_at_fixed_mode(problem, prior=value), abs=1e-8)


def test_noise_scale_by_evidence():
    problem = LinearRegression()
    guide = problem.guide()
    curve = guide.tune(problem.batches, NoiseScale(), refinements=25, **QUIET)
    assert curve.best == pytest.approx(maximum(lambda s: evidence_at_fixed_mode(problem, noise=s)), rel=1e-3)
    assert guide.scale_factors == {"y": curve.best}


def test_tuned_scales_are_used_everywhere():
    problem = LinearRegression()
    guide = problem.guide()
    prior = guide.tune(problem.batches, **QUIET).best
    noise = guide.tune(problem.batches, NoiseScale(), **QUIET).best
    tuned = LinearRegression(prior_scale=0.7 * prior**-0.5, noise=0.5 * noise)
    x = problem.x[:4]
    expected = torch.einsum("bi,ij,bj->b", x, torch.linalg.inv(tuned.precision()), x)
    torch.testing.assert_close(guide.predictive(x).variance, expected)
    found = predict(problem.model, guide, x, method=Linearised())
    torch.testing.assert_close(found.variance, expected + tuned.noise**2, check_dtype=False)
    guide.polish(problem.batches, **QUIET)  # the minimum with the tuned scales
    tuned.y = problem.y
    torch.testing.assert_close(guide.locs.weight.detach(), tuned.mode())
    guide.fit(problem.batches, Dense(Hessian()))
    assert guide.log_evidence(problem.batches).value == pytest.approx(tuned.log_evidence(), abs=1e-9)


def test_tuned_scales_are_saved():
    problem = LinearRegression()
    guide = problem.guide()
    guide.tune(problem.batches, **QUIET)
    other = problem.guide()
    other.load_state_dict(guide.state_dict())
    assert other.scale_factors == guide.scale_factors
    torch.testing.assert_close(other.predictive(problem.x).variance, guide.predictive(problem.x).variance)
    other.scale_factors = {}
    with pytest.raises(GuideError, match="scale_factors has changed"):
        other.predictive(problem.x)


def test_one_site_at_a_time():
    problem = SineRegression(hidden=4)
    guide = problem.trained(300)
    guide.polish(problem.batches, **QUIET)
    curve = guide.tune(problem.batches, PriorPrecision("w1"), values=[0.3, 1.0, 3.0], refinements=0, **QUIET)
    for value, score in zip(curve.values.tolist(), curve.scores.tolist(), strict=True):
        other = problem.trained(0)
        with torch.no_grad():
            for name, u in guide.unconstrained_mode().items():
                getattr(other.locs, name).copy_(u)
        other.scale_factors = {"w1": value**-0.5}
        assert score == pytest.approx(other.log_evidence(problem.batches).value, abs=1e-8)
    assert set(guide.scale_factors) == {"w1"}


def test_prior_precision_by_validation():
    problem = LinearRegression()
    generator = torch.Generator().manual_seed(1)
    x = 3 * torch.randn(30, 3, dtype=torch.float64, generator=generator)
    y = x @ problem.mode() + 0.8
    guide = problem.guide()
    values = [0.01, 0.1, 1.0, 10.0, 100.0]
    curve = guide.tune(
        problem.batches,
        criterion=ByValidation([(x[:20], y[:20]), (x[20:], y[20:])]),
        values=values,
        refinements=0,
        **QUIET,
    )
    for value, score in zip(curve.values.tolist(), curve.scores.tolist(), strict=True):
        precision = LinearRegression(prior_scale=0.7 * value**-0.5).precision()
        variance = torch.einsum("bi,ij,bj->b", x, torch.linalg.inv(precision), x)
        density = dist.Normal(x @ problem.mode(), (variance + 0.25).sqrt()).log_prob(y)
        assert score == pytest.approx(float(density.mean()), abs=1e-9)
    assert curve.best == values[int(curve.scores.argmax())]


def test_edge_of_the_values_is_reported():
    problem = LinearRegression()
    with pytest.warns(DviWarning, match="smallest value that was tried") as warned:
        curve = problem.guide().tune(problem.batches, values=[100.0, 1000.0], **QUIET)
    assert curve.at_edge and curve.best == 100 and warned[0].filename == __file__


def test_what_cannot_be_tuned_is_refused():
    problem = LinearRegression()
    with pytest.raises(ArgumentError, match="no uncertain site"):
        problem.guide().tune(problem.batches, PriorPrecision("bias"), **QUIET)
    with pytest.raises(ArgumentError, match="positive"):
        problem.guide().tune(problem.batches, values=[-1.0, 1.0], **QUIET)
    with pytest.raises(ModelError, match="one observed site"):
        problem.guide().tune(problem.batches, NoiseScale("z"), **QUIET)
    guide = guide_at(hierarchical, (problem.x, problem.y), {"scale": torch.zeros(()), "w": problem.mode()})
    with pytest.raises(UnsupportedError, match="'scale', a LogNormal"):
        guide.tune([(problem.x, problem.y)], PriorPrecision("scale"), **QUIET)
    tempered = guide_at(problem.model, problem.batches[0], {"weight": problem.mode()}, kl_weight=0.5)
    with pytest.raises(ArgumentError, match="kl_weight=1"):
        tempered.tune(problem.batches, **QUIET)


def test_curve_is_missing_where_there_is_no_gaussian():
    problem = SineRegression(hidden=10, prior_scale=3.0)
    guide = problem.trained(500)
    guide.polish(problem.batches, **QUIET)
    curve = guide.tune(
        problem.batches, method=Dense(Hessian()), values=[1e-4, 1.0, 3.0, 1e4], refinements=0, **QUIET
    )
    assert math.isnan(float(curve.scores[0])) and not math.isnan(float(curve.scores[1]))
