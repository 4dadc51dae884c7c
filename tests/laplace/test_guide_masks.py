# SPDX-License-Identifier: Apache-2.0
"""A Gaussian over some entries of sites, the others of which stay at their mode."""

import io
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import pyro_dvi as dvi
from pyro_dvi.analysis.diagnostics.posterior_scales import scale_report, signal_to_noise
from pyro_dvi.errors import ArgumentError, UnsupportedError
from pyro_dvi.laplace import (
    ConjugateGradient,
    Dense,
    Diagonal,
    Hessian,
    HessianFree,
    KroneckerFactored,
    LaplaceGuide,
    PosteriorSamples,
    TopEigen,
)
from tests.laplace.problems import LinearRegression, SineRegression, guide_at

QUIET = {"progress": False}
GRID = torch.linspace(-5, 5, 4, dtype=torch.float64).unsqueeze(-1)
MASKS = {
    "w1": torch.tensor([[True, False, True, False, False]]),
    "w2": torch.tensor([False, True, True, True, False]),
}
SUBSET = {"*": False, **MASKS, "b2": True}
SIZE = 6


@pytest.fixture(scope="module")
def polished() -> tuple[SineRegression, LaplaceGuide]:
    problem = SineRegression(hidden=5)
    guide = problem.trained(300)
    guide.polish(problem.batches, **QUIET)
    return problem, guide


@pytest.fixture
def sine(polished: tuple[SineRegression, LaplaceGuide]) -> tuple[SineRegression, LaplaceGuide]:
    """The guide as polished, without what other tests have fitted."""
    problem, guide = polished
    return problem, guide_at(problem.model, (problem.x, problem.y), guide.unconstrained_mode())


def outputs(problem: SineRegression, guide: LaplaceGuide, x: Tensor, vector: Tensor) -> Tensor:
    """The network at other values of the entries that vary, by hand."""
    u = guide.unconstrained_mode()
    ends = [2, 5]
    first, second, u["b2"] = vector[: ends[0]], vector[ends[0] : ends[1]], vector[ends[1]]
    u["w1"] = u["w1"].index_put(MASKS["w1"].nonzero(as_tuple=True), first)
    u["w2"] = u["w2"].index_put(MASKS["w2"].nonzero(as_tuple=True), second)
    return torch.tanh(x @ u["w1"] + u["b1"]) @ u["w2"] / math.sqrt(problem.hidden) + u["b2"]


def brute_force(problem: SineRegression, guide: LaplaceGuide, curvature: str) -> tuple[Tensor, Tensor]:
    """Precision [D, D], and variances of the outputs on the grid, by ``torch.func``."""
    u = guide.unconstrained_mode()
    start = torch.cat([u["w1"][MASKS["w1"]], u["w2"][MASKS["w2"]], u["b2"].reshape(1)])

    def energy(vector: Tensor) -> Tensor:
        residuals = (problem.y - outputs(problem, guide, problem.x, vector)) / problem.noise
        return 0.5 * residuals.square().sum() + 0.5 * vector.square().sum() / problem.prior_scale**2

    if curvature == "Hessian":
        precision = torch.func.jacrev(torch.func.jacrev(energy))(start)
    else:
        jacobian = torch.func.jacrev(lambda v: outputs(problem, guide, problem.x, v))(start)
        precision = jacobian.T @ jacobian / problem.noise**2 + torch.eye(len(start)) / problem.prior_scale**2
    queries = torch.func.jacrev(lambda v: outputs(problem, guide, GRID, v))(start)
    return precision, (queries @ torch.linalg.solve(precision, queries.T)).diagonal()


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("method", "tolerance"),
    [
        (Dense(), 1e-9),
        (Dense(Hessian()), 1e-9),
        (ConjugateGradient(tolerance=1e-9), 1e-6),
        (ConjugateGradient(Hessian(), tolerance=1e-9), 1e-6),
        (TopEigen(SIZE), 1e-6),
        (PosteriorSamples(2000), 5 * math.sqrt(2 / 2000)),  # five standard errors
        (HessianFree(), 5e-3),
    ],
    ids=lambda value: repr(value)[:28] if not isinstance(value, float) else "",
)
def test_predictions_are_those_of_the_entries_that_vary(sine, method, tolerance):
    problem, guide = sine
    posterior = guide.fit(problem.batches, method, subset=SUBSET, seed=1)
    assert len(posterior.mode) == SIZE
    _, expected = brute_force(problem, guide, type(method.precision).__name__)
    torch.testing.assert_close(guide.predictive(GRID).variance, expected, rtol=tolerance, atol=0)
    predicted = dvi.predict(problem.model, guide, GRID)
    torch.testing.assert_close(predicted.variance, expected + problem.noise**2, rtol=tolerance, atol=0)


@pytest.mark.parametrize("curvature", ["GGN", "Hessian"])
def test_diagonals_are_those_of_the_matrix(sine, curvature):
    problem, guide = sine
    precision, _ = brute_force(problem, guide, curvature)
    method = Diagonal() if curvature == "GGN" else Diagonal(Hessian())
    torch.testing.assert_close(
        guide.fit(problem.batches, method, subset=SUBSET).precision, precision.diagonal()
    )


def test_evidence_and_tuning_are_given_what_stays(sine):
    """A last layer of which three weights and the bias are uncertain is a linear regression on what the rest leaves."""
    problem, guide = sine
    subset = {"w2": MASKS["w2"], "b2": True}
    guide.polish(problem.batches, subset=subset, **QUIET)
    u = guide.unconstrained_mode()
    h = torch.tanh(problem.x @ u["w1"] + u["b1"]) / math.sqrt(problem.hidden)
    design = torch.cat([h[:, MASKS["w2"]], torch.ones_like(h[:, :1])], -1)
    left = problem.y - h[:, ~MASKS["w2"]] @ u["w2"][~MASKS["w2"]]
    covariance = design @ design.T + problem.noise**2 * torch.eye(len(left)).double()
    exact = float(dist.MultivariateNormal(torch.zeros_like(left), covariance).log_prob(left))
    found = guide.log_evidence(problem.batches, subset=subset)
    assert found.value == pytest.approx(exact, abs=1e-7) and found.size == 4

    for method in (Dense(), Diagonal()):
        curve = guide.tune(
            problem.batches,
            method=method,
            subset=subset,
            values=[0.02, 0.3, 3.0],
            refinements=0,
            unconverged="accept",
            **QUIET,
        )
        varying = torch.cat([u["w2"][MASKS["w2"]], u["b2"].reshape(1)])
        noise = dist.Normal(left, problem.noise).log_prob(design @ varying).sum()
        for value, score in zip(curve.values, curve.scores, strict=True):
            precision = design.T @ design / problem.noise**2 + value * torch.eye(4).double()
            precision = precision if isinstance(method, Dense) else precision.diagonal().diag()
            log_prior = dist.Normal(torch.zeros(4).double(), value**-0.5).log_prob(varying).sum()
            expected = noise + log_prior + 2 * math.log(2 * math.pi) - 0.5 * precision.logdet()
            assert float(score) == pytest.approx(float(expected), abs=1e-8)
        assert guide.posterior.mode.numel() == 4  # the fit after tuning has the same entries
        assert guide.log_evidence(problem.batches).value == pytest.approx(float(curve.scores.max()), abs=1e-8)
        guide.scale_factors = {}


def transformed(x, y=None):
    """Weights with a common uncertain scale, and two positive rates in one site."""
    scale = pyro.sample("scale", dist.LogNormal(x.new_zeros(()), 0.5))
    w = pyro.sample("w", dist.Normal(x.new_zeros(()), scale).expand([3]).to_event(1))
    rate = pyro.sample("rate", dist.Gamma(x.new_full((2,), 2.0), 3.0).to_event(1))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(x @ w + rate.sum(), 0.5), obs=y)


def test_the_prior_of_entries_counts_in_unconstrained_space_and_where_it_depends_on_what_varies():
    problem = LinearRegression()
    logs = torch.tensor([0.3, -0.2], dtype=torch.float64)
    locs = {"scale": torch.tensor(-0.4), "w": problem.mode(), "rate": logs}
    guide = guide_at(transformed, (problem.x, problem.y), locs)
    weights = dist.Normal(torch.zeros(3).double(), math.exp(-0.4)).log_prob(problem.mode())
    rates = dist.Gamma(2.0, 3.0).log_prob(logs.exp()) + logs
    of_scale = dist.Normal(0.0, 0.5).log_prob(torch.tensor(-0.4))  # of the logarithm
    some, one = torch.tensor([True, False, True]), torch.tensor([False, True])

    def log_prior(subset: dict) -> float:
        return guide.log_evidence([(problem.x, problem.y)], subset=subset).log_prior

    assert log_prior({"w": some}) == pytest.approx(float(weights[some].sum()), abs=1e-6)
    assert log_prior({"rate": one}) == pytest.approx(float(rates[1]), abs=1e-6)
    assert log_prior({"w": some, "scale": True}) == pytest.approx(float(weights.sum() + of_scale), abs=1e-6)


def test_only_the_entries_that_vary_are_polished(polished):
    problem, guide = polished
    before = guide.unconstrained_mode()
    moved = guide_at(problem.model, (problem.x, problem.y), {n: u + 0.1 for n, u in before.items()})
    report = moved.polish(problem.batches, subset=SUBSET, **QUIET)
    assert report.converged and moved.diagnose(problem.batches, subset=SUBSET).converged
    for name, start in before.items():
        fixed = ~MASKS[name] if name in MASKS else torch.full_like(start, name != "b2", dtype=torch.bool)
        after = moved.unconstrained_mode()[name]
        assert torch.equal(after[fixed], (start + 0.1)[fixed]) and bool((after != start + 0.1)[~fixed].all())


def test_draws_and_marginals_have_no_spread_elsewhere(sine):
    problem, guide = sine
    posterior = guide.fit(problem.batches, Dense(), subset=SUBSET)
    draws = guide.sample(5)
    with pytest.warns(match="weights are drawn"):
        drawn = pyro.infer.Predictive(problem.model, guide=guide, num_samples=3, return_sites=["w1"])(GRID)
    for name, mask in MASKS.items():
        spread = draws[name].std(0)
        assert torch.equal(spread > 0, mask)
        assert torch.equal(draws[name][0][~mask], guide.unconstrained_mode()[name][~mask])
    assert torch.equal(drawn["w1"].squeeze(1).std(0) > 0, MASKS["w1"])
    exported = dvi.to_arviz(problem.model, guide, (problem.x, problem.y), num_samples=4).posterior["w1"]
    assert torch.equal(torch.as_tensor(exported.values).std((0, 1)) > 0, MASKS["w1"])
    deviations = torch.cat([guide.get_posterior()[name].stddev[mask] for name, mask in MASKS.items()])
    torch.testing.assert_close(deviations, posterior.marginal_variance()[:5].sqrt())
    low, high = guide.quantiles([0.1, 0.9])["w1"]
    assert torch.equal(high > low, MASKS["w1"])
    assert sum(ratio.numel() for ratio in signal_to_noise(guide).values()) == SIZE
    assert scale_report(guide)["elements"] == [2, 3, 1]


def test_a_file_holds_the_mask(sine):
    problem, guide = sine
    guide.fit(problem.batches, Dense(), subset=SUBSET)
    buffer = io.BytesIO()
    torch.save(guide.state_dict(), buffer)
    buffer.seek(0)
    pyro.clear_param_store()
    other = LaplaceGuide(problem.model)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    torch.testing.assert_close(other.predictive(GRID).variance, guide.predictive(GRID).variance)
    assert other.log_evidence(problem.batches).size == SIZE
    assert other.fitted.layout.chosen["w1"].dtype == torch.int64


def test_the_last_of_several_patterns_counts(sine):
    problem, guide = sine
    everything = guide.energy(problem.batches, subset={"*": True, "b*": False, "b2": True})
    assert everything.layout.names == ["w1", "w2", "b2"] and not everything.layout.chosen
    full = {name: torch.ones_like(u, dtype=torch.bool) for name, u in guide.unconstrained_mode().items()}
    assert not guide.energy(problem.batches, subset=full).layout.chosen  # whole sites cost what they did


@pytest.mark.parametrize(
    ("subset", "message"),
    [
        ({"w2": torch.ones(4, dtype=torch.bool)}, r"'w2'.*shape \(5,\).*got torch.bool of shape \(4,\)"),
        ({"w2": torch.ones(5)}, "'w2'.*boolean.*torch.float32"),
        ({"w2": torch.zeros(5, dtype=torch.bool)}, "subset is empty"),
        ({"w3": True}, "'w3', which is not a site"),
        ({"w2": None}, "'w2'.*boolean"),
    ],
    ids=["shape", "type", "nothing", "name", "none"],
)
def test_masks_that_do_not_fit_are_refused(sine, subset, message):
    problem, guide = sine
    with pytest.raises(ArgumentError, match=message):
        guide.fit(problem.batches, subset=subset)


def test_what_takes_whole_sites_refuses_masks(sine):
    problem, guide = sine
    with pytest.raises(
        UnsupportedError, match=r"KroneckerFactored\(\) does not support masks.*w1, w2.*Diagonal"
    ):
        guide.fit(problem.batches, KroneckerFactored(), subset=SUBSET)

    def coupled(x, y=None):
        w = pyro.sample("w", dist.MultivariateNormal(x.new_zeros(3), torch.eye(3).to(x) + 0.5))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)

    regression = LinearRegression()
    data = [(regression.x, regression.y)]
    guide = guide_at(coupled, data[0], {"w": regression.mode()})
    subset = {"w": torch.tensor([True, True, False])}
    precision = guide.fit(data, Dense(), subset=subset, unconverged="accept").precision
    prior = torch.linalg.inv(torch.eye(3).double() + 0.5)
    torch.testing.assert_close(precision, (regression.x.T @ regression.x / 0.25 + prior)[:2, :2])
    with pytest.raises(UnsupportedError, match="prior of 'w' .MultivariateNormal. couples its entries"):
        guide.log_evidence(data)
