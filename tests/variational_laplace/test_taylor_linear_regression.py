# SPDX-License-Identifier: Apache-2.0
"""Bayesian linear regression with known noise, where the ELBO and the best mean-field posterior are closed-form."""

from collections.abc import Callable

import pyro
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import ExponentialLR

from pyro_dvi.curvature import EmpiricalFisher, Fisher, GGNDiagonal, HessianDiagonal, MinibatchGradient
from pyro_dvi.variational_laplace.taylor import TaylorELBO
from tests.models import GUIDES, POINT_GUIDE, GuideCase, LinearRegression, gradients
from tests.objectives.closed_form import check_full_batch, check_minibatches, closed_form, minibatches

EXACT = [GGNDiagonal, HessianDiagonal]
every_guide = pytest.mark.parametrize("case", GUIDES, ids=lambda c: c.name)
every_exact_curvature = pytest.mark.parametrize("curvature", EXACT, ids=lambda c: c.__name__)


@pytest.fixture
def problem() -> LinearRegression:
    return LinearRegression()


@every_exact_curvature
@every_guide
@pytest.mark.parametrize("kl_weight", [1.0, 0.03, 0.0])
def test_exact_curvatures_give_the_closed_form_elbo_and_its_gradient(problem, case, curvature, kl_weight):
    check_full_batch(TaylorELBO(curvature=curvature(), kl_weight=kl_weight), problem, case, kl_weight)


@every_exact_curvature
@every_guide
def test_minibatches_average_to_the_full_batch(problem, case, curvature):
    check_minibatches(TaylorELBO(curvature=curvature(), num_data=problem.num_data), problem, case)


def penalty_deviation(problem: LinearRegression, case: GuideCase, guide: object) -> float:
    """Standard deviation of the penalty of one label draw: that of a quadratic form in Gaussian gradients."""
    moments = case.moments(guide)
    weight = moments["weight"][1].detach().expand(problem.num_features)
    scale = torch.cat([weight, moments["bias"][1].detach().reshape(1)])
    product = torch.diag(scale**2) @ problem.information()
    return (0.5 * (product @ product).trace()).sqrt().item()


@pytest.mark.every(4)
@every_guide
def test_fisher_is_unbiased_on_the_full_batch(problem, case):
    """Two-sided z-test at 4: false alarm about once in 16,000 seeds."""
    guide = case.start(problem)
    draws = 600
    elbo = TaylorELBO(curvature=Fisher(num_label_samples=draws))
    loss = elbo.loss(problem.model, guide, problem.x, problem.y)
    expected = problem.loss(case.moments(guide)).item()
    z = (loss - expected) / (penalty_deviation(problem, case, guide) / draws**0.5)
    assert abs(z) < 4


def repeated(problem: LinearRegression, guide: object, elbo: TaylorELBO, data: Callable, count: int) -> tuple:
    losses, grads = [], []
    for i in range(count):
        losses.append(elbo.loss_and_grads(problem.model, guide, *data(i)))
        grads.append(torch.cat([g.reshape(-1) for _, g in sorted(gradients().items())]))
    return torch.tensor(losses, dtype=torch.float64), torch.stack(grads)


@pytest.mark.slow
def test_fisher_penalties_of_some_steps_are_unbiased_over_steps(problem):
    """Loss and all eight gradients: z < 4 fails by chance about once in 1,800 seeds."""
    case = GUIDES[0]
    guide = case.start(problem)
    batches = minibatches(problem, 6)
    # Blocks of steps in which every minibatch occurs once: what varies between blocks is the draw alone.
    block = len(batches) * 3
    elbo = TaylorELBO(curvature=Fisher(every=3))
    losses, grads = repeated(problem, guide, elbo, lambda i: batches[i % len(batches)], 252)
    expected, expected_grads = closed_form(problem, case, guide)
    target = torch.cat(
        [torch.tensor([expected]), *[g.reshape(-1) for _, g in sorted(expected_grads.items())]]
    )
    values = torch.cat([losses[:, None], grads], 1).unfold(0, block, block).mean(-1)
    z = (values.mean(0) - target) / (values.std(0) / len(values) ** 0.5)
    assert z.abs().max() < 4


@pytest.mark.slow
def test_num_label_samples_shrinks_the_noise(problem):
    case = GUIDES[0]
    guide = case.start(problem)
    single = penalty_deviation(problem, case, guide)
    elbo = TaylorELBO(curvature=Fisher(num_label_samples=16))
    losses = torch.tensor([elbo.loss(problem.model, guide, problem.x, problem.y) for _ in range(90)])
    assert losses.std().item() == pytest.approx(single / 4, rel=0.32)  # 4.3 errors of 0.075


def test_point_masses_give_map_estimation(problem):
    guide = POINT_GUIDE.start(problem)
    elbo = TaylorELBO()
    loss = elbo.loss_and_grads(problem.model, guide, problem.x, problem.y)
    grads = gradients()
    expected = problem.map_loss(POINT_GUIDE.moments(guide))
    expected.backward()
    assert loss == pytest.approx(expected.item(), abs=1e-10)
    for name, grad in gradients().items():
        torch.testing.assert_close(grads[name], grad, atol=1e-10, rtol=1e-10)
    assert elbo.terms["penalty"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in GUIDES if c.learns_scales], ids=lambda c: c.name)
def test_fitted_variances_are_those_of_the_best_mean_field_posterior(problem, case):
    guide = case.make(problem.model)
    guide(problem.x, problem.y)
    optim = ExponentialLR({"optimizer": torch.optim.Adam, "optim_args": {"lr": 0.1}, "gamma": 0.98})
    svi = SVI(problem.model, guide, optim, loss=TaylorELBO(curvature=GGNDiagonal()))
    for _ in range(250):
        svi.step(problem.x, problem.y)
        optim.step()
    compare_with_optimum(problem, case, guide, rel=0.005)


@pytest.mark.slow
def test_sampled_labels_fit_the_same_variances(problem):
    case = GUIDES[0]
    guide = case.make(problem.model)
    optim = ExponentialLR({"optimizer": torch.optim.Adam, "optim_args": {"lr": 0.1}, "gamma": 0.982})
    svi = SVI(problem.model, guide, optim, loss=TaylorELBO(curvature=Fisher(num_label_samples=48)))
    for _ in range(350):
        svi.step(problem.x, problem.y)
        optim.step()
    compare_with_optimum(problem, case, guide, rel=0.02)


def compare_with_optimum(problem: LinearRegression, case: GuideCase, guide: object, rel: float) -> None:
    precision = problem.information().diagonal() + problem.prior_scale**-2
    moments = case.moments(guide)
    weight = precision[:-1].mean() if case.shared_scales else precision[:-1]
    torch.testing.assert_close(
        moments["weight"][1].detach() ** 2 * weight, torch.ones_like(moments["weight"][1]), rtol=rel, atol=0
    )
    assert (moments["bias"][1] ** 2 * precision[-1]).item() == pytest.approx(1, rel=rel)
    # The best mean is that of the exact posterior.
    full = problem.information() + torch.eye(len(precision)) / problem.prior_scale**2
    design = torch.cat([problem.x, torch.ones_like(problem.x[:, :1])], -1)
    exact = torch.linalg.solve(full, design.T @ problem.y / problem.noise**2)
    loc = torch.cat([moments["weight"][0], moments["bias"][0].reshape(1)]).detach()
    torch.testing.assert_close(loc, exact, atol=0.02, rtol=0.02)


def test_empirical_fisher_is_the_sum_of_squared_residual_gradients(problem):
    case = GUIDES[0]
    guide = case.start(problem)
    moments = case.moments(guide)
    (weight, sw), (bias, sb) = moments["weight"], moments["bias"]
    residual = (problem.y - problem.x @ weight - bias) / problem.noise**2
    design = torch.cat([problem.x, torch.ones_like(problem.x[:, :1])], -1)
    squares = (residual[:, None] * design).square().sum(0)
    expected = 0.5 * (torch.cat([sw, sb.reshape(1)]) ** 2 * squares).sum()
    elbo = TaylorELBO(curvature=EmpiricalFisher())
    elbo.loss(problem.model, guide, problem.x, problem.y)
    assert elbo.terms["penalty"].item() == pytest.approx(expected.item(), abs=1e-9)


@pytest.mark.parametrize("size", [1, 4, 12])
def test_the_printed_empirical_fisher_has_a_term_for_each_minibatch(problem, size):
    """Eq. 27: averaged over the minibatches of an epoch, a sum of their squared gradients, by a loop."""
    case = GUIDES[0]
    guide = case.start(problem)
    (weight, sw), (bias, sb) = case.moments(guide).values()
    elbo, squares, penalties = TaylorELBO(curvature=MinibatchGradient()), torch.zeros(4).double(), []
    for rows in torch.arange(len(problem.x)).split(size):
        x, y = problem.x[rows], problem.y[rows]
        residual = (y - x @ weight - bias) / problem.noise**2
        gradient = residual @ torch.cat([x, torch.ones_like(x[:, :1])], -1)
        squares = squares + gradient.square()
        elbo.loss(problem.model, guide, x, y)
        penalties.append(elbo.terms["penalty"])
    expected = 0.5 * (torch.cat([sw, sb.reshape(1)]) ** 2 * squares).sum()
    torch.testing.assert_close(torch.stack(penalties).mean(), expected.detach())
    per_example = TaylorELBO(curvature=EmpiricalFisher())
    per_example.loss(problem.model, guide, problem.x, problem.y)
    assert torch.isclose(per_example.terms["penalty"], expected.detach()) == (size == 1)


def test_single_precision_agrees_with_double(problem):
    case = GUIDES[0]
    guide = case.start(problem)
    double = TaylorELBO(curvature=GGNDiagonal()).loss(problem.model, guide, problem.x, problem.y)
    single = LinearRegression(dtype=torch.float32)
    for _, parameter in pyro.get_param_store().named_parameters():
        parameter.data = parameter.data.float()
    loss = TaylorELBO(curvature=GGNDiagonal()).differentiable_loss(single.model, guide, single.x, single.y)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(double, rel=1e-5)
