# SPDX-License-Identifier: Apache-2.0
"""Bayesian linear regression with known noise: moments of a linear model are exact, and so is the ELBO."""

import pytest
import torch

from pyro_dvi.elbos import MomentPropagationELBO
from tests.models import GUIDES, POINT_GUIDE, GuideCase, LinearRegression, gradients

every_guide = pytest.mark.parametrize("case", [*GUIDES, POINT_GUIDE], ids=lambda c: c.name)


@pytest.fixture
def problem() -> LinearRegression:
    return LinearRegression()


def closed_form(problem: LinearRegression, case: GuideCase, guide: object, kl_weight: float) -> tuple:
    moments = case.moments(guide)
    loss = problem.map_loss(moments) if case is POINT_GUIDE else problem.loss(moments, kl_weight)
    loss.backward()
    return loss.item(), gradients()


@every_guide
@pytest.mark.parametrize("kl_weight", [1.0, 0.03])
def test_loss_and_gradient_are_those_of_the_closed_form(problem, case, kl_weight):
    if case is POINT_GUIDE:
        kl_weight = 1.0
    guide = case.start(problem)
    elbo = MomentPropagationELBO(kl_weight=kl_weight)
    loss = elbo.loss_and_grads(problem.model, guide, problem.x, problem.y)
    grads = gradients()
    expected, expected_grads = closed_form(problem, case, guide, kl_weight)
    assert loss == pytest.approx(expected, abs=1e-8)
    assert grads.keys() == expected_grads.keys()
    for name, grad in expected_grads.items():
        torch.testing.assert_close(grads[name], grad, atol=1e-8, rtol=1e-8)
    assert elbo.loss(problem.model, guide, problem.x, problem.y) == pytest.approx(expected, abs=1e-8)


@every_guide
def test_minibatches_average_to_the_full_batch(problem, case):
    guide = case.start(problem)
    elbo = MomentPropagationELBO(num_data=problem.num_data)
    batches = list(zip(problem.x.split(4), problem.y.split(4), strict=True))
    losses = [elbo.loss_and_grads(problem.model, guide, x, y) for x, y in batches]
    grads = gradients()
    expected, expected_grads = closed_form(problem, case, guide, 1.0)
    assert sum(losses) / len(batches) == pytest.approx(expected, abs=1e-8)
    for name, grad in expected_grads.items():
        torch.testing.assert_close(grads[name] / len(batches), grad, atol=1e-8, rtol=1e-8)
