# SPDX-License-Identifier: Apache-2.0
"""Distributions with missing values have the density and the information of the given values."""

import math

import pyro.distributions as dist
import pytest
import torch

from pyro_dvi.curvature.information import expected_information
from pyro_dvi.runs.missing import without_missing

NAN = math.nan
VALUE = torch.tensor([[0.1, 0.2, 3.4], [0.5, 0.1, NAN], [NAN, 0.5, NAN], [NAN, NAN, NAN]]).double()
ROOT = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.8, 0.0], [-0.3, 0.4, 1.2]]).double()


def squares(fn, loc):
    """Return the diagonal of the Fisher information in the elements of the location."""
    total = torch.zeros_like(loc)
    for f, w in expected_information(fn, "y"):
        for output, weight in zip(f.flatten(), w.flatten(), strict=True):
            if output.requires_grad:
                (gradient,) = torch.autograd.grad(output, loc, retain_graph=True)
                total += (weight * gradient).square()
    return total.detach()


def test_events_that_are_observed_in_part_are_marginalised():
    loc = torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
    given = dist.NanMaskedMultivariateNormal(loc, scale_tril=ROOT)
    fn, value = without_missing(given, VALUE)
    torch.testing.assert_close(fn.log_prob(value), given.log_prob(VALUE))
    expected = torch.zeros(4, 3).double()
    for row, seen in enumerate(VALUE.isfinite()):
        covariance = (ROOT @ ROOT.mT)[seen][:, seen]
        expected[row, seen] = covariance.inverse().diagonal()
    torch.testing.assert_close(squares(fn, loc), expected)


@pytest.mark.parametrize(
    "wrap", [lambda fn: fn, lambda fn: fn.to_event(1), lambda fn: fn.mask(torch.tensor(True))]
)
def test_missing_elements_are_masked_inside_wrappers(wrap):
    loc = torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
    given = wrap(dist.NanMaskedNormal(loc, 0.5))
    fn, value = without_missing(given, VALUE)
    torch.testing.assert_close(fn.log_prob(value), given.log_prob(VALUE))
    torch.testing.assert_close(squares(fn, loc), 4.0 * VALUE.isfinite().double())
    assert value.isfinite().all()


def test_other_distributions_stay_as_they_are():
    fn = dist.Normal(torch.zeros(4, 3), 1.0)
    assert without_missing(fn, VALUE) == (fn, VALUE)
