# SPDX-License-Identifier: Apache-2.0
"""Every method against the dense matrix, and against closed forms of linear regression."""

import io
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_dvi.errors import (
    ArgumentError,
    NotConvergedError,
    NotPositiveDefiniteError,
    UnsupportedError,
)
from pyro_dvi.laplace import (
    ConjugateGradient,
    Dense,
    Diagonal,
    Functional,
    Hessian,
    KroneckerFactored,
    LaplaceGuide,
    Method,
    PosteriorSamples,
    TopEigen,
)
from pyro_dvi.laplace.methods.method import LaplacePosterior
from tests.laplace.cases import CASES, DRAWS, HESSIAN, Case, assert_within, fit, query_of
from tests.laplace.problems import LinearRegression, SineRegression, guide_at


@pytest.fixture(scope="module")
def sine() -> tuple[SineRegression, LaplaceGuide]:
    problem = SineRegression(hidden=5)
    return problem, problem.trained(60)


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.exact])
def test_linear_regression_has_its_closed_form(name: str) -> None:
    problem, case = LinearRegression(), CASES[name]
    guide = problem.guide()
    posterior = fit(guide, problem.batches, case.method, seed=1)
    queries = torch.linspace(-2, 2, 12, dtype=torch.float64).reshape(4, 3)
    expected = queries @ torch.linalg.solve(problem.precision(), queries.T)
    query = query_of(guide, problem.model, queries)
    assert_within(posterior.joint_covariance(query), expected, case)
    variance = posterior.covariance(query)
    torch.testing.assert_close(variance[:, 0, 0], posterior.joint_covariance(query).diagonal())
    torch.testing.assert_close(guide.predictive(queries).variance, variance[:, 0, 0])
    if "log_determinant" not in case.unsupported:
        assert float(posterior.log_determinant()) == pytest.approx(
            float(problem.precision().logdet()), abs=1e-9
        )


@pytest.mark.parametrize("name", CASES)
def test_a_network_has_the_covariance_of_the_dense_matrix(
    name: str, sine: tuple[SineRegression, LaplaceGuide]
) -> None:
    problem, guide = sine
    case = CASES[name]
    posterior = fit(guide, problem.batches, case.method, seed=2)
    dense = fit(guide, problem.batches, Dense())
    if name == "diagonal":
        dense.precision.copy_(dense.precision.diagonal().diag())
        dense = type(dense)(dense.mode, dense.precision)
    elif not case.exact:
        return  # has tests of its own
    query = query_of(guide, problem.model, torch.linspace(-5, 5, 4, dtype=torch.float64).unsqueeze(-1))
    assert_within(posterior.covariance(query), dense.covariance(query), case)
    assert_within(posterior.joint_covariance(query), dense.joint_covariance(query), case)
    if "marginal_variance" not in case.unsupported:
        expected = dense.marginal_variance()
        error = (posterior.marginal_variance() / expected - 1).abs().max()
        assert float(error) <= max(1e-6, 5 * case.relative_error)
    if "log_determinant" not in case.unsupported:
        torch.testing.assert_close(posterior.log_determinant(), dense.log_determinant())
    if "solve" not in case.unsupported:
        vectors = torch.randn(3, len(dense.mode), dtype=torch.float64)
        torch.testing.assert_close(posterior.solve(vectors), dense.solve(vectors), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", CASES)
def test_what_a_method_cannot_do_is_refused(name: str, sine: tuple[SineRegression, LaplaceGuide]) -> None:
    problem, guide = sine
    posterior = fit(guide, problem.batches, CASES[name].method)
    arguments = {"draw": (1, torch.Generator()), "solve": (posterior.mode.unsqueeze(0),)}
    for operation in ("draw", "solve", "marginal_variance", "log_determinant"):
        call = getattr(posterior, operation)
        if operation in CASES[name].unsupported:
            with pytest.raises(UnsupportedError, match=type(posterior).__name__):
                call(*arguments.get(operation, ()))
        else:
            call(*arguments.get(operation, ()))


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if "draw" not in c.unsupported])
def test_draws_have_the_covariance_of_the_posterior(
    name: str, sine: tuple[SineRegression, LaplaceGuide]
) -> None:
    """5 standard errors for each entry: the failure rate is below 1e-4 in all."""
    problem, guide = sine
    posterior = fit(guide, problem.batches, CASES[name].method, seed=3)
    query = query_of(guide, problem.model, torch.tensor([[-4.0], [0.5], [3.0]], dtype=torch.float64))
    draws = posterior.draw(DRAWS, torch.Generator().manual_seed(4)) - posterior.mode
    moved = query.forward(draws).flatten(1)
    found = moved.T @ moved / DRAWS
    assert_within(
        found, posterior.joint_covariance(query), Case(CASES[name].method, relative_error=(2 / DRAWS) ** 0.5)
    )
    assert float((moved.mean(0) / found.diagonal().sqrt()).abs().max()) < 5 / DRAWS**0.5


@pytest.mark.parametrize("name", CASES)
def test_a_posterior_is_made_again_from_what_a_file_holds(
    name: str, sine: tuple[SineRegression, LaplaceGuide]
) -> None:
    problem, guide = sine
    posterior = fit(guide, problem.batches, CASES[name].method)
    if posterior.stored is None:
        with pytest.raises(UnsupportedError, match="again after loading"):
            posterior.state()
        return
    file = io.BytesIO()
    torch.save(posterior.state(), file)
    file.seek(0)
    again = LaplacePosterior.kinds[posterior.kind](**torch.load(file, weights_only=True))
    query = query_of(guide, problem.model, problem.x[:3])
    torch.testing.assert_close(again.covariance(query), posterior.covariance(query))


@pytest.mark.parametrize("name", HESSIAN)
def test_the_hessian_serves_as_well(name: str) -> None:
    problem = LinearRegression()
    guide = problem.guide()
    posterior = fit(guide, problem.batches, HESSIAN[name])
    queries = torch.eye(3, dtype=torch.float64)
    expected = torch.linalg.inv(problem.precision())
    torch.testing.assert_close(posterior.joint_covariance(query_of(guide, problem.model, queries)), expected)


def test_the_diagonal_of_the_hessian(sine: tuple[SineRegression, LaplaceGuide]) -> None:
    problem = LinearRegression()
    posterior = fit(problem.guide(), problem.batches, Diagonal(Hessian()))
    torch.testing.assert_close(posterior.marginal_variance(), 1 / problem.precision().diagonal())


# --- errors ----------------------------------------------------------------------------------------------------


def hierarchical(x: Tensor, y: Tensor | None = None) -> Any:
    scale = pyro.sample("scale", dist.LogNormal(x.new_zeros(()), 0.5))
    weight = pyro.sample("weight", dist.Normal(0.0, scale.expand(x.shape[1])).to_event(1))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(x @ weight, 0.5), obs=y)


def at_hierarchical() -> tuple[LaplaceGuide, list, LinearRegression]:
    data = LinearRegression()
    locs = {"scale": torch.zeros((), dtype=torch.float64), "weight": 0.3 * torch.ones(3, dtype=torch.float64)}
    return guide_at(hierarchical, (data.x, data.y), locs), [(data.x, data.y)], data


@pytest.mark.parametrize(
    "method", [PosteriorSamples(8), TopEigen(2), KroneckerFactored(), Functional()], ids=repr
)
def test_a_hierarchical_prior_is_refused_by_name_where_it_has_no_diagonal(method: Method) -> None:
    guide, batches, _ = at_hierarchical()
    with pytest.raises(UnsupportedError, match="'scale' and 'weight'"):
        fit(guide, batches, method)
    fit(guide, batches, method, subset="weight")


def test_a_hierarchical_prior_is_no_obstacle_to_solves() -> None:
    guide, batches, data = at_hierarchical()
    dense = fit(guide, batches, Dense()).covariance(query_of(guide, hierarchical, data.x))
    found = fit(guide, batches, ConjugateGradient()).covariance(query_of(guide, hierarchical, data.x))
    torch.testing.assert_close(found, dense, rtol=1e-6, atol=1e-9)


def test_negative_curvature_and_unfinished_solves_are_errors(
    sine: tuple[SineRegression, LaplaceGuide],
) -> None:
    problem, _ = sine
    guide = problem.trained(3)
    query = torch.linspace(-5, 5, 9, dtype=torch.float64).unsqueeze(-1)
    fit(guide, problem.batches, ConjugateGradient(Hessian()))
    with pytest.raises(NotPositiveDefiniteError, match="not a minimum") as caught:
        guide.predictive(query)
    assert caught.value.curvature < 0
    with pytest.raises(NotPositiveDefiniteError, match="not a minimum"):
        fit(guide, problem.batches, TopEigen(1000, Hessian()))
    fit(guide, problem.batches, ConjugateGradient(max_iterations=1))
    with pytest.raises(NotConvergedError, match="after 1 iterations"):
        guide.predictive(query[:3])
    with pytest.raises(NotConvergedError, match="after 1 iterations"):
        fit(guide, problem.batches, PosteriorSamples(4, max_iterations=1))


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: PosteriorSamples(0), ArgumentError),
        (lambda: TopEigen(0), ArgumentError),
        (lambda: ConjugateGradient(tolerance=0.0), ArgumentError),
        (lambda: ConjugateGradient(tolerance=1.0), ArgumentError),
    ],
)
def test_methods_refuse_what_they_cannot_be(make: Callable[[], Method], error: type[Exception]) -> None:
    with pytest.raises(error):
        make()


@pytest.mark.every(3)
@pytest.mark.parametrize("method", [Dense(Hessian()), Functional(), ConjugateGradient()], ids=repr)
def test_gradients_that_are_switched_off_change_nothing(method: Method) -> None:
    problem = SineRegression(hidden=2)
    guide = problem.trained(200)
    with torch.no_grad():
        assert guide.polish(problem.batches, progress=False).converged
        guide.fit(problem.batches, method)
        silent = guide.predictive(problem.x).variance, guide.log_evidence(problem.batches).value
    guide.fit(problem.batches, method)
    torch.testing.assert_close(silent[0], guide.predictive(problem.x).variance, rtol=1e-9, atol=0)
    assert silent[1] == pytest.approx(guide.log_evidence(problem.batches).value, abs=1e-9)
