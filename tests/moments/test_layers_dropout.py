# SPDX-License-Identifier: Apache-2.0
"""Dropout: closed forms against sums over the mask, and against the function itself."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.moments import GaussianMoments
from tests.moments.battery import CHECKS, Case, check_certain_limit


def plain(p: float) -> Callable:
    """Mean and variance by summing over the mask."""

    def oracle(loc: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        second = (loc.square() + variance) / (1 - p)
        return loc, second - loc.square()

    return oracle


CASES = [
    Case(F.dropout, args=(0.5, True), oracle=plain(0.5)),
    Case(F.dropout, args=(0.2, True), oracle=plain(0.2)),
    Case(F.dropout1d, (2, 3, 4), kwargs={"p": 0.3}, oracle=plain(0.3)),
    Case(F.dropout2d, (1, 2, 2, 2), kwargs={"p": 0.3}, oracle=plain(0.3)),
    Case(F.dropout3d, (1, 2, 1, 2, 2), kwargs={"p": 0.3}, oracle=plain(0.3)),
]


@pytest.mark.parametrize(
    "check", [c for c in CHECKS if c is not check_certain_limit], ids=lambda c: c.__name__[6:]
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule(case: Case, check: Callable) -> None:
    check(case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_moments_of_the_function_itself(case: Case) -> None:
    """A z-test of means and variances over masks and inputs; |z| < 5 fails once in 10^5 for the few elements."""
    generator = torch.manual_seed(0)
    n, shape = 40_000, (2, 2, 1, 1, 1)[: max(len(case.shape), 1)]
    loc = torch.tensor([0.3, -1.2, 2.0, 0.0])[: 2 if len(shape) == 1 else 4].reshape(shape)
    variance = torch.full_like(loc, 0.4)
    x = loc + variance.sqrt() * torch.randn(n, *shape, generator=generator)
    flat = x.reshape(n * shape[0], *shape[1:]) if len(shape) > 1 else x  # features of each example drop alone
    samples = case(flat).reshape(x.shape).double()
    y = case(GaussianMoments(loc, variance))
    error = samples.var(0) / n
    assert ((samples.mean(0) - y.loc) / error.sqrt()).abs().max() < 5
    squares = (samples - samples.mean(0)).square()
    assert ((squares.mean(0) - y.variance) / (squares.var(0) / n).sqrt()).abs().max() < 5


@pytest.mark.parametrize("func", [F.dropout, F.dropout2d])
def test_nothing_happens_in_evaluation_or_without_probability(func: Callable) -> None:
    x = GaussianMoments(torch.randn(2, 3, 4, 4), torch.rand(2, 3, 4, 4))
    assert func(x, 0.5, False) is x
    assert func(x, 0.0, True) is x
    assert torch.nn.Dropout(0.5).eval()(x) is x


def test_everything_dropped_is_certain() -> None:
    y = F.dropout(GaussianMoments(torch.randn(3), torch.rand(3)), 1.0, True)
    assert y.loc.abs().max() == y.variance.abs().max() == 0
