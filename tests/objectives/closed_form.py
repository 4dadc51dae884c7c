# SPDX-License-Identifier: Apache-2.0
"""What every objective that is exact for linear models has to meet: the closed form of linear regression."""

import pytest
import torch
from pyro.infer import ELBO
from torch import Tensor

from tests.models import POINT_GUIDE, GuideCase, LinearRegression, gradients


def closed_form(problem: LinearRegression, case: GuideCase, guide: object, kl_weight: float = 1.0) -> tuple:
    """Loss and gradients; of a point mass, those of MAP estimation."""
    moments = case.moments(guide)
    loss = problem.map_loss(moments) if case is POINT_GUIDE else problem.loss(moments, kl_weight)
    loss.backward()
    return loss.item(), gradients()


def minibatches(problem: LinearRegression, size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(problem.x.split(size), problem.y.split(size), strict=True))


def check_full_batch(elbo: ELBO, problem: LinearRegression, case: GuideCase, kl_weight: float) -> None:
    """The loss of a step, its gradient and the loss of an evaluation are those of the closed form."""
    guide = case.start(problem)
    loss = elbo.loss_and_grads(problem.model, guide, problem.x, problem.y)
    grads = gradients()
    expected, expected_grads = closed_form(problem, case, guide, kl_weight)
    assert loss == pytest.approx(expected, abs=1e-8)
    assert grads.keys() == expected_grads.keys()
    for name, grad in expected_grads.items():
        torch.testing.assert_close(grads[name], grad, atol=1e-8, rtol=1e-8)
    assert elbo.loss(problem.model, guide, problem.x, problem.y) == pytest.approx(expected, abs=1e-8)


def check_minibatches(elbo: ELBO, problem: LinearRegression, case: GuideCase) -> None:
    """Losses and gradients of minibatches average to those of the closed form of the full batch."""
    guide = case.start(problem)
    batches = minibatches(problem, 4)
    losses = [elbo.loss_and_grads(problem.model, guide, x, y) for x, y in batches]
    grads = gradients()
    expected, expected_grads = closed_form(problem, case, guide)
    assert sum(losses) / len(batches) == pytest.approx(expected, abs=1e-8)
    for name, grad in expected_grads.items():
        torch.testing.assert_close(grads[name] / len(batches), grad, atol=1e-8, rtol=1e-8)
