# SPDX-License-Identifier: Apache-2.0
"""Pre-trained modes of Hessian-free Laplace, and the variances of the latents themselves."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from benchmarks.laplace.hessian_free.second_fits import AbsoluteSum, SecondFits, Sum, parameter_uncertainty
from benchmarks.laplace.hessian_free.solvers import SGD, NewtonCG
from benchmarks.laplace.hessian_free.training_modes import InSample, LabelShift
from pyro_dvi.errors import (
    ArgumentError,
    DviWarning,
    ModelError,
    NotPositiveDefiniteError,
    UnsupportedError,
)
from pyro_dvi.laplace import Dense, Hessian, HessianFree, LaplaceGuide
from pyro_dvi.laplace.energy.query import Query
from tests.laplace.minima import at_minimum, pretrained
from tests.laplace.problems import LinearRegression, SineRegression, ragged


@pytest.fixture(scope="module")
def sine() -> tuple[SineRegression, LaplaceGuide]:
    problem = SineRegression(hidden=4, num_data=15)
    return problem, at_minimum(problem.trained(), problem.batches, problem.model)


GRID = torch.linspace(-6, 6, 7, dtype=torch.float64).unsqueeze(-1)


# --- pre-trained modes: what they target ---------------------------------------------------------------------


def dense_covariance(problem: SineRegression, guide: LaplaceGuide, *inputs: Tensor) -> Tensor:
    guide.fit(problem.batches, Dense(Hessian()))
    found = guide.predictive(torch.cat(inputs), joint=True).joint_covariance
    assert found is not None
    return found


EVALUATION = torch.tensor([[-3.0], [0.5], [2.0], [5.0]], dtype=torch.float64)


@pretrained
def test_sum_gives_row_means(sine: tuple[SineRegression, LaplaceGuide]) -> None:
    problem, guide = sine
    target = dense_covariance(problem, guide, GRID, EVALUATION)[: len(GRID), len(GRID) :].mean(1)
    posterior: Any = guide.fit(problem.batches, SecondFits(Sum(EVALUATION)))
    found = responses(guide, posterior, GRID)
    torch.testing.assert_close(found, target, rtol=2e-2, atol=1e-4)
    before = posterior.local.energy.work.done
    torch.testing.assert_close(responses(guide, posterior, GRID[:2]), found[:2])
    assert posterior.local.energy.work.done == before  # one fit serves all queries


@pretrained
def test_sum_over_the_query_itself(sine: tuple[SineRegression, LaplaceGuide]) -> None:
    problem, guide = sine
    target = dense_covariance(problem, guide, GRID).mean(1)
    posterior = guide.fit(problem.batches, SecondFits(Sum()))
    torch.testing.assert_close(responses(guide, posterior, GRID), target, rtol=2e-2, atol=1e-4)


@pretrained
def test_absolute_sum_gives_signed_row_means(sine: tuple[SineRegression, LaplaceGuide]) -> None:
    problem, guide = sine
    covariance = dense_covariance(problem, guide, GRID, EVALUATION)
    signs = guide.predictive(torch.cat([GRID, EVALUATION])).mean.sign()
    target = (covariance * signs * signs.unsqueeze(-1))[: len(GRID), len(GRID) :].mean(1)
    posterior = guide.fit(problem.batches, SecondFits(AbsoluteSum(EVALUATION)))
    torch.testing.assert_close(responses(guide, posterior, GRID), target, rtol=2e-2, atol=1e-4)


@pretrained
@pytest.mark.parametrize("mode", [InSample(), LabelShift()], ids=type)
def test_training_modes_give_row_means_over_the_data(
    sine: tuple[SineRegression, LaplaceGuide], mode: Any
) -> None:
    problem, guide = sine
    target = dense_covariance(problem, guide, GRID, problem.x)[: len(GRID), len(GRID) :].mean(1)
    posterior = guide.fit(problem.batches, SecondFits(mode))
    torch.testing.assert_close(responses(guide, posterior, GRID), target, rtol=2e-2, atol=1e-4)


def responses(guide: LaplaceGuide, posterior: Any, x: Tensor) -> Tensor:
    """The numbers of either sign that a mode gives."""
    with torch.no_grad():
        result: Tensor = posterior.responses(query(guide, x))[:, 0, 0]
    return result


def query(guide: LaplaceGuide, x: Tensor) -> Query:
    fitted: Any = guide._fitted
    return Query(guide._plain_model.get(), (x,), fitted.point.locs, fitted.layout)


class TwoColumns:
    """Linear regression with two columns of labels, of different noise, that share a slope."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(4)
        self.x = torch.randn(6, dtype=torch.float64, generator=generator)
        self.y = torch.randn(6, 2, dtype=torch.float64, generator=generator)
        self.noise = torch.tensor([0.5, 2.0], dtype=torch.float64)
        self.batches = ragged(self.x, self.y, 4)

    def model(self, x: Tensor, y: Tensor | None = None) -> Any:
        slope = pyro.sample("slope", dist.Normal(x.new_zeros(()), 1.0))
        offsets = pyro.sample("offsets", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
        with pyro.plate("data", 6, subsample_size=len(x)):
            loc = slope * x.unsqueeze(-1) + offsets
            return pyro.sample("y", dist.Normal(loc, self.noise).to_event(1), obs=y)


@pretrained
def test_label_shift_of_several_columns_with_tempering() -> None:
    problem = TwoColumns()
    guide = LaplaceGuide(problem.model, kl_weight=0.4)
    guide.initialize(*problem.batches[0])
    guide = at_minimum(guide, problem.batches, problem.model, kl_weight=0.4)
    found = []
    for mode in (InSample(), LabelShift()):
        posterior: Any = guide.fit(
            problem.batches, SecondFits(mode, solver=NewtonCG(HessianFree(solve_tolerance=1e-9)))
        )
        found.append(posterior.responses(query(guide, problem.x)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-9)
    guide.fit(problem.batches, Dense(Hessian()))
    joint = guide.predictive(problem.x, joint=True).joint_covariance
    assert joint is not None
    means = joint.reshape(6, 2, 6, 2).mean(2)
    torch.testing.assert_close(found[0], 0.5 * (means + means.mT), rtol=1e-5, atol=1e-9)


@pretrained
def test_negative_row_means_are_refused_not_turned() -> None:
    problem = LinearRegression(num_features=1)
    guide = problem.guide()
    far = torch.tensor([[3.0], [1.0]], dtype=torch.float64)
    posterior = guide.fit(problem.batches, SecondFits(Sum(far)))
    opposite = torch.tensor([[-1.0]], dtype=torch.float64)
    assert float(responses(guide, posterior, opposite)) == pytest.approx(
        -2 / float(problem.precision()), rel=1e-3
    )
    with pytest.raises(NotPositiveDefiniteError, match=r"1 of 1 variances of Sum\(\) are negative"):
        guide.predictive(opposite)
    with pytest.raises(UnsupportedError, match="Pointwise"):
        guide.predictive(far, joint=True)


def test_pretrained_modes_warn() -> None:
    problem = LinearRegression()
    with pytest.warns(DviWarning, match="not variances"):
        problem.guide().fit(problem.batches, SecondFits(InSample()))


def test_batches_of_named_arguments() -> None:
    problem = LinearRegression()
    guide = problem.guide()
    found = []
    for batches in (problem.batches, [{"y": y, "x": x} for x, y in problem.batches]):
        with pytest.warns(DviWarning):
            posterior = guide.fit(batches, SecondFits(InSample()))
        found.append(responses(guide, posterior, problem.x))
    torch.testing.assert_close(found[0], found[1])


@pretrained
def test_label_shift_needs_gaussian_noise_of_known_scale() -> None:
    def classes(x: Tensor, y: Tensor | None = None) -> Any:
        slope = pyro.sample("slope", dist.Normal(x.new_zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Categorical(logits=slope * x.unsqueeze(-1)), obs=y)

    x, labels = torch.ones(3), torch.tensor([0, 1, 2])
    guide = LaplaceGuide(classes)
    guide.initialize(x, labels)
    with pytest.raises(ModelError, match="Categorical"):
        guide.fit([(x, labels)], SecondFits(LabelShift()), unconverged="accept")

    def model(x: Tensor, y: Tensor | None = None) -> Any:
        noise = pyro.sample("noise", dist.HalfNormal(x.new_ones(())))
        slope = pyro.sample("slope", dist.Normal(x.new_zeros(()), 1.0))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(slope * x, noise), obs=y)

    guide = LaplaceGuide(model)
    guide.initialize(x, x)
    with pytest.raises(ModelError, match="does not depend on the latents"):
        guide.fit([(x, x)], SecondFits(LabelShift()), unconverged="accept")


# --- what is subtracted, and mistakes ------------------------------------------------------------------------


@pytest.mark.parametrize("less", ["opposite", "untilted", "mode"])
def test_linear_regression_is_exact(less: str) -> None:
    problem = LinearRegression()
    guide = problem.guide()
    solver = NewtonCG(HessianFree(step=0.5, solve_tolerance=1e-10))
    guide.fit(problem.batches, SecondFits(solver=solver, less=less))
    x = torch.randn(4, problem.num_features, dtype=torch.float64)
    exact = x @ torch.linalg.inv(problem.precision()) @ x.T
    found = guide.predictive(x, joint=True)
    torch.testing.assert_close(found.joint_covariance, exact, rtol=0, atol=1e-6 * float(exact.abs().max()))


def test_names_instead_of_objects() -> None:
    with pytest.raises(ArgumentError, match=r"Pointwise\(\), Sum\(inputs\)"):
        SecondFits("pointwise")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"NewtonCG\(\) or Adam\(strength\)"):
        SecondFits(solver="adam")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"NewtonCG\(\) or Adam\(strength\)"):
        parameter_uncertainty(LinearRegression().guide(), [], solver=NewtonCG)  # type: ignore[arg-type]


@pytest.mark.parametrize("solver", [NewtonCG(), SGD(0.5, 1e-3, epochs=2)], ids=type)
def test_latents_outside_a_mask_have_no_variance(solver: Any) -> None:
    problem = LinearRegression()
    mask = torch.tensor([True, False, True])
    found = parameter_uncertainty(problem.guide(), problem.batches, subset={"weight": mask}, solver=solver)
    assert torch.equal(found["weight"] > 0, mask)


# --- the latents themselves ----------------------------------------------------------------------------------


def test_parameter_uncertainty_gives_signed_row_sums() -> None:
    problem = LinearRegression(num_features=3)
    covariance = torch.linalg.inv(problem.precision())
    signs = problem.mode().sign()
    target = (covariance * signs * signs.unsqueeze(-1)).sum(1)
    assert bool((target > 0).all())
    found = parameter_uncertainty(
        problem.guide(), problem.batches, solver=NewtonCG(HessianFree(solve_tolerance=1e-10))
    )
    torch.testing.assert_close(found["weight"], target, rtol=1e-6, atol=0)


def test_negative_row_sums_are_nan_with_a_warning() -> None:
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(30, 1, dtype=torch.float64, generator=generator)
    x = torch.cat([common, 0.1 * common], 1) + 0.05 * torch.randn(
        30, 2, dtype=torch.float64, generator=generator
    )
    problem = LinearRegression(num_data=30, num_features=2, prior_scale=3.0)
    problem.x, problem.y = x, x @ torch.tensor([2.0, 2.0], dtype=torch.float64)
    covariance = torch.linalg.inv(problem.precision())
    negative = (covariance * problem.mode().sign() * problem.mode().sign().unsqueeze(-1)).sum(1) < 0
    assert int(negative.sum()) == 1
    with pytest.warns(DviWarning, match="1 of 2 signed row sums"):
        found = parameter_uncertainty(problem.guide(), problem.batches)["weight"]
    assert torch.equal(found.isnan(), negative)


def test_sparsification_removes_what_the_data_do_not_need() -> None:
    problem = LinearRegression(num_data=200, num_features=6, noise=0.3)
    truth = torch.tensor([1.0, 0.0, -0.7, 0.0, 0.0, 0.5], dtype=torch.float64)
    noise = torch.randn(200, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    problem.y = problem.x @ truth + 0.3 * noise
    variance = parameter_uncertainty(problem.guide(), problem.batches)["weight"]
    mode = problem.mode()
    kept = mode.abs() > 3 * variance.sqrt()
    assert torch.equal(kept, truth != 0)
    rmse = (problem.x @ (mode * kept) - problem.x @ truth).square().mean().sqrt()
    assert float(rmse) < float((problem.x @ (mode - truth)).square().mean().sqrt())  # zeros were true
