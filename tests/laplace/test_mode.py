# SPDX-License-Identifier: Apache-2.0
"""Polishing a mode, telling what is wrong with one, and what a fit does about it."""

import math
import signal

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro.infer.autoguide import init_to_value

from pyro_dvi import regressor, to_bayesian_
from pyro_dvi.errors import (
    ArgumentError,
    DataError,
    DviWarning,
    GuideError,
    ModelError,
    NonFiniteError,
    UnconvergedError,
)
from pyro_dvi.laplace import (
    ConjugateGradient,
    Dense,
    Hessian,
    LaplaceGuide,
)
from pyro_dvi.laplace.energy.energy import LocalEnergy
from pyro_dvi.laplace.mode.search import Search
from tests.laplace.problems import LinearRegression, SineRegression, guide_at, ragged

QUIET = {"progress": False}


def dense_hessian(guide, batches):
    energy = guide.energy(batches)
    return energy.at(energy.start).hessian(torch.eye(energy.layout.size, dtype=energy.start.dtype))


@pytest.fixture(scope="module")
def saddle():
    """A network after 2,000 steps of Adam, whose Hessian has some twenty negative eigenvalues."""
    problem = SineRegression(hidden=50, num_data=40, noise=0.1, prior_scale=3.0)
    return problem, problem.trained(2000, rate=0.01).unconstrained_mode()


def at_saddle(saddle, dtype=torch.float64):
    problem, mode = saddle
    if dtype != torch.float64:
        problem = SineRegression(hidden=50, num_data=40, noise=0.1, prior_scale=3.0, dtype=dtype)
    mode = {name: value.to(dtype) for name, value in mode.items()}
    return problem, guide_at(problem.model, (problem.x, problem.y), mode), [(problem.x, problem.y)]


# --- polish ----------------------------------------------------------------------------------------------------------


def test_linear_regression_is_polished_to_its_closed_form():
    problem = LinearRegression()
    guide = guide_at(problem.model, problem.batches[0], {"weight": torch.zeros(3)})
    report = guide.polish(problem.batches, **QUIET)
    torch.testing.assert_close(guide.locs.weight.detach(), problem.mode(), rtol=1e-10, atol=1e-10)
    assert report.converged and report.steps <= 6
    assert report.value < report.value_before and report.gradient_norm < 1e-8
    assert "converged" in str(report)


@pytest.mark.slow
def test_network_at_a_saddle_is_polished_to_a_minimum(saddle):
    _, guide, batches = at_saddle(saddle)
    assert int((torch.linalg.eigvalsh(dense_hessian(guide, batches)) < 0).sum()) >= 10
    report = guide.polish(batches, **QUIET)
    assert report.converged
    values = torch.linalg.eigvalsh(dense_hessian(guide, batches))
    assert values[0] > 0
    # g'P^-1 g bounds the gradient by the largest eigenvalue, which is 3e5 here.
    assert report.newton_decrement <= 1e-10 and report.gradient_norm**2 <= 1e-10 * float(values[-1])
    # The smallest eigenvalue is in units of the prior precision, 1/9, and an upper bound.
    assert report.smallest_eigenvalue == pytest.approx(9 * float(values[0]), rel=0.05)
    energy = guide.energy(batches)
    assert float(energy.at(energy.start).gradient.norm()) == pytest.approx(
        report.gradient_norm, rel=1e-6, abs=1e-12
    )
    guide.polish(batches, tolerance=1e-16, **QUIET)
    energy = guide.energy(batches)
    assert float(energy.at(energy.start).gradient.norm()) < 1e-8


@pytest.mark.slow
def test_float32_is_polished_as_far_as_rounding_allows(saddle):
    _, guide, batches = at_saddle(saddle, torch.float32)
    report = guide.polish(batches, **QUIET)
    assert report.converged and guide.locs.w1.dtype == torch.float32
    assert report.newton_decrement < 1e-2
    exact = guide_at(
        SineRegression(hidden=50, num_data=40, noise=0.1, prior_scale=3.0).model,
        tuple(t.double() for t in batches[0]),
        {name: value.double() for name, value in guide.unconstrained_mode().items()},
    )
    found = exact.diagnose([tuple(t.double() for t in batches[0])])
    assert found.converged and found.newton_decrement < 1e-4


def test_subset_moves_alone():
    problem = SineRegression()
    guide = problem.trained(100)
    before = guide.unconstrained_mode()
    guide.polish(problem.batches, subset="*2", **QUIET)
    after = guide.unconstrained_mode()
    assert [name for name in after if not torch.equal(before[name], after[name])] == ["w2", "b2"]
    energy = guide.energy(problem.batches, subset="*2")
    assert float(energy.at(energy.start).gradient.norm()) < 1e-6


def test_too_few_gradients_are_an_error_that_keeps_the_progress():
    problem = SineRegression()
    guide = problem.trained(20)
    energy = guide.energy(problem.batches)
    before = float(energy.at(energy.start).value)
    with pytest.raises(UnconvergedError, match="10 gradients were not enough(.|\n)*max_gradients") as caught:
        guide.polish(problem.batches, max_gradients=10, **QUIET)
    assert "inf" not in str(caught.value)
    energy = guide.energy(problem.batches)
    after = float(energy.at(energy.start).value)
    assert after < before and after == pytest.approx(caught.value.report.value, rel=1e-12)


def test_interrupt_keeps_the_best_point(monkeypatch):
    problem = SineRegression()
    guide = problem.trained(20)

    step = Search._step

    def interrupt(self, value, decrement):
        step(self, value, decrement)
        if self.steps == 3:
            signal.raise_signal(signal.SIGINT)

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.warns(DviWarning, match="interrupted after 3 steps"):
            monkeypatch.setattr(Search, "_step", interrupt)
            report = guide.polish(problem.batches, **QUIET)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert not report.converged and report.reason == "interrupted" and report.value < report.value_before
    energy = guide.energy(problem.batches)
    assert float(energy.at(energy.start).value) == pytest.approx(report.value, rel=1e-12)


def test_direction_without_curvature_is_no_minimum():
    def model(x, y):
        pyro.sample("unused", dist.ImproperUniform(dist.constraints.real, (), ()))
        w = pyro.sample("w", dist.Normal(x.new_zeros(()), 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(w * x, 1.0), obs=y)

    x = torch.linspace(-1, 1, 5, dtype=torch.float64)
    start = {"unused": torch.zeros(()), "w": torch.zeros(())}
    guide = guide_at(model, (x, x), start, init_loc_fn=init_to_value(values=start))
    with pytest.raises(UnconvergedError, match="singular(.|\n)*prior that constrains every direction"):
        guide.polish([(x, x)], **QUIET)


def test_arguments_of_polish_are_checked():
    problem = LinearRegression()
    with pytest.raises(ArgumentError, match="tolerance"):
        problem.guide().polish(problem.batches, tolerance=0.0)
    with pytest.raises(ArgumentError, match="not a site"):
        problem.guide().polish(problem.batches, subset="bias")
    bad = [(x, y * math.nan) for x, y in problem.batches]
    with pytest.raises((NonFiniteError, DataError)):
        problem.guide().polish(bad, **QUIET)


# --- diagnose --------------------------------------------------------------------------------------------------------


def test_converged_mode():
    problem = LinearRegression()
    found = problem.guide().diagnose(problem.batches)
    assert found.converged and found.verdict.startswith("Converged")
    assert found.newton_decrement < 1e-20 and found.curvature == "Hessian"
    relative = torch.linalg.eigvalsh(problem.precision()) * problem.prior_scale**2
    assert found.smallest_eigenvalue.value == pytest.approx(float(relative[0]), rel=1e-3)


def test_decrement_is_the_squared_distance_in_posterior_standard_deviations():
    problem = LinearRegression()
    shift = torch.tensor([0.3, -0.1, 0.2], dtype=torch.float64)
    guide = guide_at(problem.model, problem.batches[0], {"weight": problem.mode() + shift})
    found = guide.diagnose(problem.batches)
    assert found.newton_decrement == pytest.approx(float(shift @ problem.precision() @ shift), rel=1e-5)
    assert not found.converged and "Not converged" in found.verdict and "polish" in str(found)


def test_saddle_is_named(saddle):
    _, guide, batches = at_saddle(saddle)
    found = guide.diagnose(batches)
    assert found.at_saddle and not found.converged and "not a minimum" in found.verdict
    values = torch.linalg.eigvalsh(dense_hessian(guide, batches))
    assert found.smallest_eigenvalue.value == pytest.approx(9 * float(values[0]), rel=0.02)
    assert "prior precisions" in str(found)


def test_nan_is_named():
    problem = LinearRegression()
    x, y = problem.x.clone(), problem.y.clone()
    y[7] = math.nan
    with pytest.raises(DataError, match="observed site 'y' contains 1 NaN or infinite values"):
        problem.guide().diagnose(ragged(x, y))
    guide = problem.guide()
    with torch.no_grad():
        guide.locs.weight[0] = math.inf
    with pytest.raises(ModelError, match="latent 'weight'"):
        guide.diagnose(problem.batches)


def test_random_model_is_named():
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(F.dropout(x, 0.5, training=True) @ w, 1.0), obs=y)

    x = torch.randn(20, 2)
    guide = guide_at(model, (x, x[:, 0]), {"w": torch.ones(2)})
    state = torch.get_rng_state()
    with pytest.raises(ModelError, match="random"):
        guide.diagnose([(x, x[:, 0])])
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(ModelError, match="random"):
        guide.fit([(x, x[:, 0])], Dense())


# --- what a fit does -------------------------------------------------------------------------------------------------


def test_fit_with_the_hessian_refuses_what_is_no_minimum(saddle):
    _, guide, batches = at_saddle(saddle)
    with pytest.raises(UnconvergedError, match=r"Dense.*not a minimum(.|\n)*GGN\(\)") as caught:
        guide.fit(batches, Dense(Hessian()))
    assert caught.value.diagnosis.at_saddle
    assert guide.posterior is None


def test_gauss_newton_matrix_warns_where_the_minimum_is_far():
    problem = LinearRegression()
    guide = guide_at(problem.model, problem.batches[0], {"weight": torch.zeros(3)})
    with pytest.warns(DviWarning, match="not a minimum.*at least|posterior standard deviations") as warned:
        guide.fit(problem.batches, Dense())
    assert warned[0].filename == __file__
    problem.guide().fit(problem.batches, Dense())  # silent


def test_policies_are_checked():
    problem = LinearRegression()
    bad = [(x * math.nan, y) for x, y in problem.batches]
    with pytest.raises(DataError, match="argument 1"):
        problem.guide().fit(bad, Dense())


def test_a_refused_fit_leaves_no_gaussian_and_no_evidence(saddle):
    problem, guide, batches = at_saddle(saddle)
    guide.fit(batches, Dense(), unconverged="accept")
    with pytest.raises(UnconvergedError):
        guide.fit(batches, ConjugateGradient(Hessian()))
    for use in (
        lambda: guide.log_evidence(batches),
        lambda: guide.log_evidence(batches, subset="w2"),
        lambda: guide.predictive(problem.x),
        lambda: guide.sample(3),
        lambda: guide.quantiles([0.5]),
    ):
        with pytest.raises(GuideError, match=r"no Gaussian.*failed.*polish.*GGN\(\)"):
            use()
    with torch.no_grad(), pytest.warns(DviWarning, match="raised an error: the guide is a point mass"):
        guide(*batches[0])
    assert "w1" in guide.median() and guide.posterior is None
    guide.fit(batches, Dense(), unconverged="accept")
    assert guide.log_evidence(batches).determinant == "DensePosterior"


@pytest.mark.parametrize("shift", [0.01, 1.0])
@pytest.mark.parametrize("stiff", [False, True])
def test_a_mode_that_was_trained_well_passes_by_an_estimate(shift, stiff):
    problem = LinearRegression(num_data=40, noise=0.01)
    values, vectors = torch.linalg.eigh(problem.precision())
    direction = vectors[:, -1] / values[-1].sqrt() if stiff else vectors[:, 0] / values[0].sqrt()
    mode = problem.mode() + shift * direction  # that many standard deviations away
    guide = guide_at(problem.model, problem.batches[0], {"weight": mode})
    found = guide.diagnose(problem.batches)
    assert found.decrement_at_least <= shift**2 * (1 + 1e-6) and found.newton_decrement >= shift**2 * (
        1 - 1e-6
    )
    assert found.converged == (shift == 0.01)
    if found.converged:
        guide.fit(problem.batches, Dense(Hessian()))
        return
    with pytest.raises(UnconvergedError, match="Not converged: the minimum is 1 posterior"):
        guide.fit(problem.batches, Dense(Hessian()))


@pytest.mark.parametrize("steps", [2, 4, 8, 13])
def test_the_decrement_lies_between_its_bounds_after_any_number_of_steps(steps):
    problem = LinearRegression(num_data=40, num_features=13, noise=0.1)
    generator = torch.Generator().manual_seed(0)
    shift = 0.02 * torch.randn(13, dtype=torch.float64, generator=generator)
    guide = guide_at(problem.model, problem.batches[0], {"weight": problem.mode() + shift})
    true = float(shift @ problem.precision() @ shift)
    for tolerance in (0.5 * true, 2 * true):
        found = guide.diagnose(problem.batches, steps=steps, tolerance=tolerance)
        assert found.decrement_at_least <= true * (1 + 1e-9) and true <= found.newton_decrement * (1 + 1e-9)
        assert found.converged == (found.newton_decrement <= tolerance)
        start = "Converged" if found.converged else "Undecided: the minimum is between"
        assert found.verdict.startswith("Not converged" if found.decrement_at_least > tolerance else start)
    assert found.converged or steps < 13


def test_kinks_refuse_the_hessian_at_once(monkeypatch):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.ReLU(), torch.nn.Linear(20, 1)).double()
    x = torch.linspace(-1, 1, 12).double().unsqueeze(-1)
    model = regressor(to_bayesian_(net), num_data=12, noise_scale=0.1)
    guide, batches = LaplaceGuide(model), [(x, x.sin())]
    with monkeypatch.context() as patched:
        patched.setattr(LocalEnergy, "hessian", None)
        with pytest.raises(UnconvergedError, match=r"kinks \(relu\).*GGN\(\).*smooth_activations_") as caught:
            guide.fit(batches, Dense(Hessian()))
        assert caught.value.diagnosis.kinks == ("relu",)
        found = guide.diagnose(batches)
        assert found.curvature == "GGN" and not found.near and "kinks (relu)" in found.verdict
        with pytest.warns(DviWarning, match=r"(?s)not a minimum.*kinks \(relu\)"):
            guide.fit(batches, Dense())
    guide.polish(batches, subset="net.2.*", **QUIET)
    guide.fit(batches, Dense(Hessian()), subset="net.2.*")  # linear in these


def test_accept_leaves_it_to_the_method(saddle):
    _, guide, batches = at_saddle(saddle)
    with pytest.raises(ArithmeticError, match="not positive"):
        guide.fit(batches, Dense(Hessian()), unconverged="accept")
