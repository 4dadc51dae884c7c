# SPDX-License-Identifier: Apache-2.0
"""Moments of latents in the space of their site."""

import pytest
import torch
from torch.distributions import biject_to, constraints

from pyro_dvi.runs.posterior_run import propagated

LOC, SCALE = torch.tensor([0.0, 0.5]), torch.tensor([0.5, 0.2])


@pytest.mark.parametrize("support", [constraints.positive, constraints.independent(constraints.positive, 1)])
def test_a_positive_site_has_the_moments_of_a_log_normal(support):
    """Also where ``to_event`` has made an event of its elements."""
    moments = propagated(LOC, SCALE, biject_to(support))
    exact = torch.distributions.LogNormal(LOC, SCALE)
    torch.testing.assert_close(moments.loc, exact.mean)
    torch.testing.assert_close(moments.variance, exact.variance)


def test_a_simplex_stands_at_its_median():
    transform = biject_to(constraints.simplex)
    torch.testing.assert_close(propagated(LOC, SCALE, transform), transform(LOC))
