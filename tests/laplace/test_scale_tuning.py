# SPDX-License-Identifier: Apache-2.0
"""What is tuned after training, against closed forms and against fits for each value."""

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import pyro_dvi
from pyro_dvi import predict, to_bayesian_
from pyro_dvi.errors import ArgumentError, DataError, DviWarning, GuideError, ModelError, UnsupportedError
from pyro_dvi.laplace import (
    ByEvidence,
    ByLanczos,
    ByValidation,
    ConjugateGradient,
    Dense,
    Diagonal,
    Functional,
    Hessian,
    KroneckerFactored,
    LaplaceGuide,
    NoiseScale,
    PosteriorSamples,
    PriorPrecision,
    TopEigen,
)
from pyro_dvi.laplace.energy.energy import Energy, LocalEnergy
from pyro_dvi.laplace.evidence.candidates import Scale
from pyro_dvi.predictive import Linearised
from tests.laplace.problems import LinearRegression, SineRegression, guide_at

QUIET = {"progress": False}


def hierarchical(x, y=None):
    scale = pyro.sample("scale", dist.LogNormal(x.new_zeros(()), 0.5))
    w = pyro.sample("w", dist.Normal(x.new_zeros(()), scale).expand([x.shape[1]]).to_event(1))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)


def evidence_at_fixed_mode(problem, prior=1.0, noise=1.0):
    """Log p(D | mode) + log p_c(mode) + D/2 log 2 pi - 1/2 log det P_c, written out."""
    mode = problem.mode()
    sigma, scale = noise * problem.noise, problem.prior_scale * prior**-0.5
    fit = dist.Normal(problem.x @ mode, sigma).log_prob(problem.y).sum()
    log_prior = dist.Normal(torch.zeros((), dtype=torch.float64), scale).log_prob(mode).sum()
    precision = problem.x.T @ problem.x / sigma**2 + torch.eye(len(mode), dtype=torch.float64) / scale**2
    return float(fit + log_prior + len(mode) / 2 * math.log(2 * math.pi) - 0.5 * torch.logdet(precision))


def maximum(function, low=-7.0, high=7.0, count=801):
    """Where a function of the logarithm is largest, by brute force and a parabola."""
    grid = torch.linspace(low, high, count, dtype=torch.float64)
    values = torch.tensor([function(math.exp(float(t))) for t in grid], dtype=torch.float64)
    i = int(values.argmax())
    a, b, c = values[i - 1], values[i], values[i + 1]
    return math.exp(float(grid[i] + 0.5 * (a - c) / (a - 2 * b + c) * (grid[1] - grid[0])))


@pytest.mark.parametrize("determinant", [None, ByLanczos(num_probes=2, steps=3)])
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


@pytest.mark.slow
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
        criterion=ByValidation([(x[:20], y[:20]), {"y": y[20:], "x": x[20:]}]),
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


PRIORS = {
    "of a different weight": lambda w: pyro.poutine.scale(dist_sample, 0.5)("w", w),
    "heavy-tailed": lambda w: pyro.sample("w", dist.StudentT(5.0, w, 0.7).to_event(1)),
    "with a mean": lambda w: pyro.sample("w", dist.Normal(w + 0.2, 0.7).to_event(1)),
}


def dist_sample(name, zeros):
    return pyro.sample(name, dist.Normal(zeros, 0.7).to_event(1))


@pytest.mark.every(3)
@pytest.mark.filterwarnings(
    "ignore:the best value of:pyro_dvi.errors.DviWarning"
)  # the largest of three values
@pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS)
@pytest.mark.parametrize("method", [Dense(), Diagonal()], ids=repr)
def test_scores_are_evidences_of_the_rescaled_model(prior, method):
    """Closed forms of Normal priors, and runs of others, against a fit with each value."""
    problem = LinearRegression()

    def model(x, y=None):
        w = prior(x.new_zeros(x.shape[1]))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)

    batches = problem.batches
    guide = guide_at(model, batches[0], {"w": problem.mode()})
    values = [0.25, 1.0, 6.0]
    options = {"method": method, "values": values, "refinements": 0, "unconverged": "accept", **QUIET}
    curve = guide.tune(batches, **options)
    for value, score in zip(values, curve.scores.tolist(), strict=True):
        guide.scale_factors = {"w": value**-0.5}
        guide.fit(batches, method, unconverged="accept")
        assert score == pytest.approx(guide.log_evidence(batches).value, abs=1e-9)


@pytest.mark.parametrize("method", [Dense(), Diagonal(), TopEigen(3)], ids=repr)
def test_the_temperature_counts_in_what_is_tuned(method):
    problem = LinearRegression()
    guide = guide_at(problem.model, problem.batches[0], {"weight": problem.mode()}, temperature=0.25)
    options = {
        "values": [0.5, 2.0, 3.0],
        "refinements": 0,
        "method": method,
        "unconverged": "accept",
        **QUIET,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DviWarning)  # at the edge of three values
        guide.tune(problem.batches, criterion=ByValidation(problem.batches), **options)
    found = guide.posterior.marginal_variance()
    fitted = guide.fit(problem.batches, method, unconverged="accept").marginal_variance()
    torch.testing.assert_close(found, fitted)


def test_classes_are_tuned_on_validation_data_or_with_a_warning():
    torch.manual_seed(0)
    x = torch.randn(30, 2)
    model = pyro_dvi.classifier(to_bayesian_(torch.nn.Linear(2, 3)), num_data=30)
    guide, batches = LaplaceGuide(model), [(x, x.argmax(1))]
    guide.polish(batches, **QUIET)
    with pytest.warns(DviWarning, match=r"under-confident.*ByValidation\(held_out\)"):
        guide.tune(batches, values=[0.01, 0.1, 1.0, 10.0, 100.0], **QUIET)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        guide.tune(batches, criterion=ByValidation(batches), values=[0.1, 1.0, 10.0], **QUIET)
    assert not [w for w in caught if "under-confident" in str(w.message)]


def test_edge_of_the_values_is_reported():
    problem = LinearRegression()
    with pytest.warns(DviWarning, match="smallest value tried") as warned:
        curve = problem.guide().tune(problem.batches, values=[100.0, 1000.0], **QUIET)
    assert curve.at_edge and curve.best == 100 and warned[0].filename == __file__


def test_what_cannot_be_tuned_is_refused():
    problem = LinearRegression()
    with pytest.raises(ArgumentError, match="matches no prior with a scale"):
        problem.guide().tune(problem.batches, PriorPrecision("bias"), **QUIET)
    with pytest.raises(ArgumentError, match="positive"):
        problem.guide().tune(problem.batches, values=[-1.0, 1.0], **QUIET)
    with pytest.raises(ModelError, match="one observed site"):
        problem.guide().tune(problem.batches, NoiseScale("z"), **QUIET)
    guide = guide_at(hierarchical, (problem.x, problem.y), {"scale": torch.zeros(()), "w": problem.mode()})
    with pytest.raises(UnsupportedError, match="'scale' is LogNormal"):
        guide.tune([(problem.x, problem.y)], PriorPrecision("scale"), **QUIET)
    tempered = guide_at(problem.model, problem.batches[0], {"weight": problem.mode()}, kl_weight=0.5)
    with pytest.raises(ArgumentError, match="tempered posterior"):
        tempered.tune(problem.batches, **QUIET)


@pytest.mark.slow
def test_curve_is_missing_where_there_is_no_gaussian():
    problem = SineRegression(hidden=10, prior_scale=3.0)
    guide = problem.trained(500)
    guide.polish(problem.batches, **QUIET)
    curve = guide.tune(
        problem.batches, method=Dense(Hessian()), values=[1e-4, 1.0, 3.0, 1e4], refinements=0, **QUIET
    )
    assert math.isnan(float(curve.scores[0])) and not math.isnan(float(curve.scores[1]))
    assert "nan: the precision is not positive definite; use GGN" in str(curve)
    guide.scale_factors = {}
    # At a fixed mode the Hessian turns singular at some noise, where the evidence is infinite.
    with pytest.warns(
        DviWarning, match="next to values for which the precision is not positive definite"
    ) as warned:
        curve = guide.tune(problem.batches, NoiseScale(), method=Dense(Hessian()), **QUIET)
    assert curve.at_edge and warned[0].filename == __file__
    best = int((curve.values == curve.best).nonzero())
    assert curve.scores[best - 1 : best + 2].isnan().any()


# --- the precision of the method ---------------------------------------------------------------------------------

LAYERS = ["0.weight", "0.bias", "2.weight", "2.bias"]


@pytest.fixture(scope="module")
def network():
    """A small network whose layers have Kronecker factors, and its data."""
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    to_bayesian_(net, prior_scale=0.8)
    x = torch.randn(12, 2, dtype=torch.float64)
    y = x.sin().sum(1)

    def model(x, y=None):
        f = net(x)[:, 0]
        with pyro.plate("data", 12, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(f, 0.3), obs=y)

    guide = LaplaceGuide(model)
    batches = [(x[:7], y[:7]), (x[7:], y[7:])]
    guide.initialize(x, y)
    guide.polish(batches, **QUIET)
    return guide, batches


def fitted_with(guide, batches, method, factors):
    """The guide with these scales, fitted without any shortcut."""
    guide.scale_factors = dict(factors)
    guide.fit(batches, method, unconverged="accept", seed=1)
    return guide.posterior


def evidence_of(guide, batches, covariance):
    """Log joint density + D/2 log 2 pi + 1/2 log det of a dense covariance."""
    energy = guide.energy(batches)
    log_joint = -float(energy.at(energy.start).value)
    return log_joint + 0.5 * len(covariance) * math.log(2 * math.pi) + 0.5 * float(covariance.logdet())


METHODS = [Diagonal(), Diagonal(Hessian()), KroneckerFactored(), TopEigen(4), Dense(), Functional()]
SCALES: list[tuple[Scale, list[str]]] = [
    (PriorPrecision(), LAYERS),
    (PriorPrecision("0.*"), LAYERS[:2]),
    (PriorPrecision("0.weight"), LAYERS[:1]),
]
SCALES += [(NoiseScale(), ["y"])]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize(("scale", "sites"), SCALES, ids=repr)
def test_evidence_and_validation_are_those_of_the_precision_that_predicts(network, method, scale, sites):
    guide, batches = network
    x = torch.randn(5, 2, dtype=torch.float64)
    held_out = [(x, x.sin().sum(1))]
    values = [0.5, 1.0, 3.0]
    options = {
        "values": values,
        "refinements": 0,
        "method": method,
        "unconverged": "accept",
        "seed": 1,
        **QUIET,
    }
    curves = []
    for criterion in (ByEvidence(), ByValidation(held_out)):
        guide.scale_factors = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DviWarning)  # at the edge of three values
            curves.append(guide.tune(batches, scale, criterion, **options))
    for index, value in enumerate(values):
        posterior = fitted_with(guide, batches, method, dict.fromkeys(sites, scale.factor(value)))
        covariance = posterior.solve(torch.eye(len(posterior.mode), dtype=torch.float64))
        assert float(curves[0].scores[index]) == pytest.approx(
            evidence_of(guide, batches, covariance), abs=1e-7
        )
        found = predict(guide.model, guide, *held_out[0][:1], method=Linearised())
        density = dist.Normal(found.mean, found.variance.sqrt()).log_prob(held_out[0][1]).mean()
        assert float(curves[1].scores[index]) == pytest.approx(float(density), abs=1e-7)


@pytest.mark.slow
def test_another_determinant_may_be_asked_for(network):
    guide, batches = network
    scores = []
    options = {"values": [0.5, 1.0, 2.0], "refinements": 0, **QUIET}
    for method in (Diagonal(), Dense()):
        guide.scale_factors = {}
        curve = guide.tune(batches, criterion=ByEvidence(ByLanczos(2, 20)), method=method, **options)
        scores.append(curve.scores)
    torch.testing.assert_close(*scores)


@pytest.mark.filterwarnings(
    "ignore:the best value of:pyro_dvi.errors.DviWarning"
)  # the largest of five values
@pytest.mark.parametrize("criterion", ["evidence", "validation"])
@pytest.mark.parametrize("method", [Diagonal(), KroneckerFactored(), Dense()], ids=repr)
def test_one_run_and_one_fit_serve_all_values_and_the_tuned_guide(network, method, criterion, monkeypatch):
    guide, batches = network
    counts = {"examples": 0, "runs": 0}
    examples, run = LocalEnergy.examples, Energy.run

    def counted_examples(self):
        counts["examples"] += 1
        return examples(self)

    def counted_run(self, *args):
        counts["runs"] += 1
        return run(self, *args)

    monkeypatch.setattr(LocalEnergy, "examples", counted_examples)
    monkeypatch.setattr(Energy, "run", counted_run)
    guide.scale_factors = {}
    by = ByEvidence() if criterion == "evidence" else ByValidation(batches)
    curve = guide.tune(batches, method=method, criterion=by, values=[0.5, 1.0, 2.0, 3.0, 4.0], **QUIET)
    assert counts["examples"] == 1
    # For all values: U in the code's scales before the tuning and before the fit, the fit, and U in the tuned scales,
    # with which log_evidence compares; once, a batch again to see that the model is not random.
    assert counts["runs"] <= 4 * len(batches) + 1
    found = guide.posterior
    again = guide.fit(batches, method)
    assert counts["examples"] == 2 and found.mode.equal(again.mode)
    torch.testing.assert_close(found.marginal_variance(), again.marginal_variance())
    assert math.isclose(guide.scale_factors["0.weight"] ** -2, curve.best)


@pytest.mark.filterwarnings("ignore:the best value of:pyro_dvi.errors.DviWarning")
def test_validation_batches_may_be_shuffled(network):
    """What is kept of a batch from one value to the next belongs to its rows."""
    guide, batches = network
    (x, y), _ = batches
    shuffled = DataLoader(TensorDataset(x, y), 3, shuffle=True, generator=torch.Generator().manual_seed(0))
    scores = []
    for held_out in (batches[:1], shuffled):
        guide.scale_factors = {}
        options = {"criterion": ByValidation(held_out), "values": [0.1, 0.5, 1.0, 2.0, 4.0]}
        scores.append(guide.tune(batches, method=Diagonal(), refinements=0, **options, **QUIET).scores)
    torch.testing.assert_close(*scores)


@pytest.mark.parametrize("names", ["0.weight", "*.bias"])
def test_a_dense_matrix_serves_the_priors_of_some_sites(network, names):
    """Against a fit with each value."""
    guide, batches = network
    guide.scale_factors = {}
    values = [0.5, 1.0, 2.0, 3.0]
    options = {"method": Dense(), "values": values, "refinements": 0}
    scores = guide.tune(batches, PriorPrecision(names), **options, **QUIET).scores
    for value, score in zip(values, scores.tolist(), strict=True):
        guide.scale_factors = {name: value**-0.5 for name in guide.scale_factors}
        guide.fit(batches, Dense())
        assert guide.log_evidence(batches).value == pytest.approx(score, rel=1e-9)


@pytest.mark.parametrize("method", [ConjugateGradient(), PosteriorSamples(8), Functional()], ids=repr)
def test_methods_with_the_matrix_itself_have_its_evidence(network, method):
    guide, batches = network
    guide.scale_factors = {}
    found = guide.tune(batches, method=method, values=[0.5, 1.0, 2.0], refinements=0, **QUIET).scores
    guide.scale_factors = {}
    dense = guide.tune(batches, method=Dense(), values=[0.5, 1.0, 2.0], refinements=0, **QUIET).scores
    torch.testing.assert_close(found, dense)


def test_one_of_several_observed_sites_is_validated():
    problem = LinearRegression()
    x, y = problem.x, problem.y

    def model(x, y=None, z=None):
        weight = pyro.sample("weight", dist.Normal(x.new_zeros(3), 0.7).to_event(1))
        with pyro.plate("data", 13, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(x @ weight, 0.5), obs=y)
            pyro.sample("z", dist.Normal(2 * (x @ weight), 0.5), obs=z)

    guide = guide_at(model, (x, y, y), {"weight": problem.mode()})
    batches, values = [(x, y, 2 * y)], [0.5, 1.0, 2.0]
    options = {"values": values, "refinements": 0, "unconverged": "accept", **QUIET}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DviWarning)  # at the edge of three values
        found = guide.tune(batches, criterion=ByValidation(batches, site="z"), **options).scores
    for value, score in zip(values, found.tolist(), strict=True):
        precision = 5 * x.T @ x / 0.25 + value / 0.49 * torch.eye(3, dtype=torch.float64)
        variance = 4 * torch.einsum("bi,ij,bj->b", x, torch.linalg.inv(precision), x)
        density = dist.Normal(2 * x @ problem.mode(), (variance + 0.25).sqrt()).log_prob(2 * y).mean()
        assert score == pytest.approx(float(density), abs=1e-9)
    guide.scale_factors = {}
    with pytest.raises(ModelError, match="'y'.*'z'|site"):
        guide.tune(batches, criterion=ByValidation(batches), **options)


@pytest.mark.parametrize("label", [-1, 2])
def test_a_validation_label_out_of_range(label):
    x, y = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2
    model = pyro_dvi.classifier(to_bayesian_(torch.nn.Linear(3, 2)), 8)
    guide = pyro_dvi.LaplaceGuide(model)
    guide.initialize(x, y)
    guide.polish([(x, y)], **QUIET)
    criterion = ByValidation([(x[:2], torch.tensor([0, label]))])
    with pytest.raises(DataError, match="'obs': labels from .*, but outputs for 2 classes"):
        guide.tune([(x, y)], criterion=criterion, **QUIET)
