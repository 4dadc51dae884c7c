# SPDX-License-Identifier: Apache-2.0
"""Quotients, powers, roots and logarithms: expansions against what they claim."""

from collections.abc import Callable

import pytest
import torch

from pyro_dvi.moments import GaussianMoments
from tests.moments.battery import CHECKS, Case, name_of_check

C = torch.linspace(-1.7, 2.0, 4, dtype=torch.float64)


def by_tangent(f: Callable) -> Callable:
    def oracle(mu: torch.Tensor, variance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mu = mu.detach().requires_grad_()
        y = f(mu)
        (slope,) = torch.autograd.grad(y.sum(), mu)
        return y.detach(), slope.square() * variance

    return oracle


TANGENTS = [
    Case(f, oracle=by_tangent(f), domain=(0.5, 9.0), scales=(1e-3, 0.1), reach=1e4)
    for f in (torch.log, torch.log1p, torch.special.log1p)
]
ROOTS = [
    Case(f, domain=(0.5, 9.0), scales=(1e-3, 0.05), reach=1e4, tolerance=(0.01, 0.01))
    for f in (torch.sqrt, torch.rsqrt)
]
CASES = [*TANGENTS, *ROOTS]


@pytest.mark.parametrize("check", CHECKS, ids=name_of_check)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule(case: Case, check: Callable[[Case], None]) -> None:
    check(case)


# Relative errors of mean and deviation at coefficients of variation 0.2 and 0.1, as the docstrings claim.
CLAIMS = {
    -1.0: ((2e-3, 7e-2), (3e-5, 4e-3)),
    -0.5: ((1e-3, 3e-2), (1e-5, 1e-3)),
    0.5: ((1e-4, 2e-3), (1e-6, 1e-4)),
    1.5: ((1e-4, 1e-3), (1e-6, 1e-4)),
    4.0: ((1e-10, 2e-2), (1e-10, 1e-3)),
}


@pytest.mark.parametrize("power", CLAIMS)
def test_powers_by_expansion_are_as_good_as_claimed(power: float) -> None:
    for (mean_error, deviation_error), variation in zip(CLAIMS[power], (0.2, 0.1), strict=True):
        m = torch.tensor(1.5, dtype=torch.float64)
        x = GaussianMoments(m, (variation * m).square() * (1 - 1e-12))
        # Integrate over the Gaussian without the far tail around 0, where 1/x has no mean.
        z = torch.linspace(-4.5, 4.5, 200_001, dtype=torch.float64)
        weight = torch.exp(-z.square() / 2)
        weight /= weight.sum()
        values = (m * (1 + variation * z)).pow(power)
        mean = (weight * values).sum()
        deviation = (weight * (values - mean).square()).sum().sqrt()
        y = x**power
        assert abs(y.loc / mean - 1) < mean_error + 1e-4
        assert abs(y.variance.sqrt() / deviation - 1) < deviation_error + 1e-3


def test_certain_over_uncertain_is_linked_to_what_is_under_it() -> None:
    x = GaussianMoments(torch.full((2,), 4.0), torch.full((2,), 0.01))
    y = 3 / x
    torch.testing.assert_close(y.link.function(torch.tensor([2.0, 4.0])), torch.tensor([1.5, 0.75]))
    torch.testing.assert_close(torch.reciprocal(x).loc, (y / 3).loc)


def test_quotient_of_uncertain_things() -> None:
    x, y = (
        GaussianMoments(C, C.square()),
        GaussianMoments(torch.full_like(C, 3.0), torch.full_like(C, 0.01)),
    )
    inverse = 1 / y
    torch.testing.assert_close((x / y).variance, (x * inverse).variance)
