# SPDX-License-Identifier: Apache-2.0
"""Bayesian linear regression with known noise: moments of a linear model are exact, and so is the ELBO."""

import pytest

from pyro_dvi.moment_propagation.elbo import MomentPropagationELBO
from tests.models import GUIDES, POINT_GUIDE, LinearRegression
from tests.objectives.closed_form import check_full_batch, check_minibatches

every_guide = pytest.mark.parametrize("case", [*GUIDES, POINT_GUIDE], ids=lambda c: c.name)


@pytest.fixture
def problem() -> LinearRegression:
    return LinearRegression()


@every_guide
@pytest.mark.parametrize("kl_weight", [1.0, 0.03])
def test_loss_and_gradient_are_those_of_the_closed_form(problem, case, kl_weight):
    if case is POINT_GUIDE:
        kl_weight = 1.0
    check_full_batch(MomentPropagationELBO(kl_weight=kl_weight), problem, case, kl_weight)


@every_guide
def test_minibatches_average_to_the_full_batch(problem, case):
    check_minibatches(MomentPropagationELBO(num_data=problem.num_data), problem, case)
