# SPDX-License-Identifier: Apache-2.0
"""Hessian-free Laplace against closed forms and the dense Hessian."""

import math
from dataclasses import dataclass
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
    UnconvergedError,
)
from pyro_dvi.laplace import Dense, Hessian, HessianFree, LaplaceGuide
from tests.laplace.minima import at_minimum
from tests.laplace.problems import LinearRegression, SineRegression, guide_at, ragged


@pytest.fixture(scope="module")
def sine() -> tuple[SineRegression, LaplaceGuide]:
    problem = SineRegression(hidden=4, num_data=15)
    return problem, at_minimum(problem.trained(), problem.batches, problem.model)


@dataclass
class Classes:
    """Softmax regression through three tanh units: K = 3 logits."""

    num_data: int = 20

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        self.x = torch.randn(self.num_data, 2, dtype=torch.float64, generator=generator)
        self.y = (self.x[:, 0] > 0).long() + (self.x[:, 1] > 0.5).long()

    def model(self, x: Tensor, y: Tensor | None = None) -> Any:
        first = pyro.sample("first", dist.Normal(x.new_zeros(()), 1.0).expand([2, 3]).to_event(2))
        last = pyro.sample("last", dist.Normal(x.new_zeros(()), 1.0).expand([3, 3]).to_event(2))
        with pyro.plate("data", self.num_data, subsample_size=len(x)):
            return pyro.sample("y", dist.Categorical(logits=torch.tanh(x @ first) @ last), obs=y)


GRID = torch.linspace(-6, 6, 7, dtype=torch.float64).unsqueeze(-1)


# --- closed forms ----------------------------------------------------------------------------------------


def test_linear_regression_is_exact() -> None:
    problem = LinearRegression()
    guide = problem.guide()
    guide.fit(problem.batches, HessianFree(step=0.5, solve_tolerance=1e-10))
    x = torch.randn(4, problem.num_features, dtype=torch.float64)
    exact = x @ torch.linalg.inv(problem.precision()) @ x.T
    found = guide.predictive(x, joint=True)
    torch.testing.assert_close(found.variance, exact.diagonal(), rtol=1e-6, atol=0)
    torch.testing.assert_close(found.joint_covariance, exact, rtol=0, atol=1e-6 * float(exact.abs().max()))


def test_tempering_is_that_of_the_energy() -> None:
    problem = LinearRegression()
    energy_at = {"weight": _tempered_mode(problem, 0.3)}
    guide = guide_at(problem.model, problem.batches[0], energy_at, kl_weight=0.3)
    x = torch.randn(3, problem.num_features, dtype=torch.float64)
    found = {}
    for method in (Dense(Hessian()), HessianFree()):
        guide.fit(problem.batches, method)
        found[type(method)] = guide.predictive(x).variance
    torch.testing.assert_close(found[HessianFree], found[Dense], rtol=1e-3, atol=0)


def _tempered_mode(problem: LinearRegression, kl_weight: float) -> Tensor:
    likelihood = problem.x.T @ problem.x / problem.noise**2 / kl_weight
    prior = torch.eye(problem.num_features, dtype=torch.float64) / problem.prior_scale**2
    return torch.linalg.solve(likelihood + prior, problem.x.T @ problem.y / problem.noise**2 / kl_weight)


# --- networks against the dense Hessian ---------------------------------------------------------------------


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-2), (torch.float32, 5e-2)])
def test_network(sine: tuple[SineRegression, LaplaceGuide], dtype: torch.dtype, tolerance: float) -> None:
    problem, guide = sine
    guide.fit(problem.batches, Dense(Hessian()))
    exact = guide.predictive(GRID).variance
    locs = {name: u.to(dtype) for name, u in guide.unconstrained_mode().items()}
    batches = [(x.to(dtype), y.to(dtype)) for x, y in problem.batches]
    same = guide_at(problem.model, batches[0], locs)
    posterior = same.fit(batches, HessianFree())
    found = same.predictive(GRID.to(dtype)).variance
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=0)
    assert posterior.local.energy.work.done < 150 * len(GRID)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_error_falls_with_the_square_of_the_step(sine: tuple[SineRegression, LaplaceGuide]) -> None:
    problem, guide = sine
    guide.fit(problem.batches, Dense(Hessian()))
    exact = guide.predictive(GRID[::3]).variance
    errors = []
    for step in (0.02, 0.01):
        exacting = HessianFree(step, tolerance=1e-8, solve_tolerance=1e-6, max_corrections=40)
        guide.fit(problem.batches, exacting)
        errors.append(float((guide.predictive(GRID[::3]).variance / exact - 1).abs().max()))
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)


def test_classification_covariance() -> None:
    problem = Classes()
    batches = ragged(problem.x, problem.y, 8)
    guide = LaplaceGuide(problem.model)
    guide.initialize(*batches[0])
    guide = at_minimum(guide, batches, problem.model)
    x = problem.x[:3]
    guide.fit(batches, Dense(Hessian()))
    exact = guide.predictive(x).covariance
    guide.fit(batches, HessianFree())
    found = guide.predictive(x).covariance
    scale = exact.diagonal(dim1=-2, dim2=-1).sqrt()
    torch.testing.assert_close(
        found / (scale.unsqueeze(-1) * scale.unsqueeze(-2)),
        exact / (scale.unsqueeze(-1) * scale.unsqueeze(-2)),
        rtol=0,
        atol=1e-2,
    )


def test_subset_varies_alone(sine: tuple[SineRegression, LaplaceGuide]) -> None:
    problem, guide = sine
    found = []
    for method in (Dense(Hessian()), HessianFree()):
        guide.fit(problem.batches, method, subset=["w2", "b2"])
        found.append(guide.predictive(GRID).variance)
    torch.testing.assert_close(found[1], found[0], rtol=1e-2, atol=0)


def test_an_output_without_latents_has_no_variance() -> None:
    def model(x: Tensor, y: Tensor | None = None) -> Any:
        slope = pyro.sample("slope", dist.Normal(x.new_zeros(()), 1.0))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)

    x = torch.tensor([0.0, 1.0], dtype=torch.float64)
    guide = guide_at(model, (x, 2 * x), {"slope": torch.tensor(1.0, dtype=torch.float64)})
    guide.fit([(x, 2 * x)], HessianFree())
    torch.testing.assert_close(guide.predictive(x).variance, 0.5 * x, rtol=1e-6, atol=0)


# --- what cannot work ------------------------------------------------------------------------------------


def test_a_saddle_is_refused() -> None:
    problem = SineRegression(hidden=4, num_data=15)
    zeros = {"w1": (1, 4), "b1": (4,), "w2": (4,), "b2": ()}
    locs = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in zeros.items()}
    locs["w1"] += 0.1  # symmetric units: a direction of negative curvature
    locs["w2"] += 0.1
    guide = guide_at(problem.model, problem.batches[0], locs)
    with pytest.raises(UnconvergedError, match="HessianFree"):
        guide.fit(problem.batches, HessianFree())
    guide.fit(problem.batches, HessianFree(), unconverged="accept")
    with pytest.raises(NotPositiveDefiniteError):
        guide.predictive(GRID)


@pytest.mark.slow
def test_a_step_that_is_too_large_is_made_smaller(sine: tuple[SineRegression, LaplaceGuide]) -> None:
    problem, guide = sine
    guide.fit(problem.batches, Dense(Hessian()))
    exact = guide.predictive(GRID[:2]).variance
    guide.fit(problem.batches, HessianFree(step=1.0))
    torch.testing.assert_close(guide.predictive(GRID[:2]).variance, exact, rtol=0.2, atol=0)


def test_minima_that_are_not_found_are_refused(sine: tuple[SineRegression, LaplaceGuide]) -> None:
    problem, guide = sine
    guide.fit(problem.batches, HessianFree(tolerance=1e-9, max_corrections=1))
    with pytest.raises(NotConvergedError, match="smaller step"):
        guide.predictive(GRID[:2])


@pytest.mark.parametrize("step", [0.0, -0.1, 1.5, math.nan])
def test_steps_out_of_range(step: float) -> None:
    with pytest.raises(ArgumentError, match="standard deviations"):
        HessianFree(step=step)


def test_options_out_of_range() -> None:
    with pytest.raises(ArgumentError, match="^tolerance must be a positive number"):
        HessianFree(tolerance=0.0)
    with pytest.raises(ArgumentError, match="^solve_tolerance must be a positive number"):
        HessianFree(solve_tolerance=-1.0)
    with pytest.raises(ArgumentError, match="max_corrections"):
        HessianFree(max_corrections=0)
