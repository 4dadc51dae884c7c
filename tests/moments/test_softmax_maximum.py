# SPDX-License-Identifier: Apache-2.0
"""The larger of two: quadrature where one is certain, a sum over a fine grid where none is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pyro_dvi.moments import GaussianMoments
from tests.moments.battery import CHECKS, Case, name_of_check

BOUND = torch.tensor(0.25, dtype=torch.float64)
EXTREMES = [torch.maximum, torch.fmax, torch.minimum, torch.fmin]
CASES = [Case(f, args=(BOUND,), kinks=(0.25,), note="0.25") for f in EXTREMES]


@pytest.mark.parametrize("check", CHECKS, ids=name_of_check)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule(case: Case, check: Callable[[Case], None]) -> None:
    check(case)


def on_a_grid(f: Callable, x: GaussianMoments, y: GaussianMoments) -> tuple[Tensor, Tensor]:
    z = torch.linspace(-8, 8, 1601, dtype=torch.float64)
    weight = torch.exp(-0.5 * (z[:, None].square() + z.square()))
    weight /= weight.sum()
    values = [m.loc + m.variance.sqrt() * z[:, None] for m in (x, y)]
    grid = f(values[0][:, None], values[1][None])
    mean = torch.einsum("abk,ab->k", grid, weight)
    return mean, torch.einsum("abk,ab->k", (grid - mean).square(), weight)


def two() -> tuple[GaussianMoments, GaussianMoments]:
    loc = torch.tensor([[0.0, 1.0, -2.0, 3.0, 0.1], [0.0, 0.5, 1.0, -1.0, 0.1]], dtype=torch.float64)
    variance = torch.tensor([[1.0, 0.3, 2.0, 0.1, 1e-4], [1.0, 1.5, 0.1, 4.0, 2.0]], dtype=torch.float64)
    return GaussianMoments(loc[0], variance[0]), GaussianMoments(loc[1], variance[1])


@pytest.mark.every(3)
@pytest.mark.parametrize("f", [*EXTREMES, torch.max, torch.min], ids=lambda f: f.__name__)
def test_of_two_gaussians(f: Callable) -> None:
    x, y = two()
    mean, variance = on_a_grid(f, x, y)
    for result in (f(x, y), f(y, x)):
        torch.testing.assert_close(result.loc, mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(result.variance, variance, rtol=2e-4, atol=1e-6)


def test_gradients_of_two() -> None:
    x, y = two()
    inputs = [t.clone().requires_grad_() for t in (x.loc, x.variance, y.loc, y.variance)]

    def moments(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        result = torch.maximum(GaussianMoments(a, b), GaussianMoments(c, d))
        return result.loc, result.variance

    assert torch.autograd.gradcheck(moments, inputs, eps=1e-7, atol=1e-5)


@pytest.mark.parametrize("f", [*EXTREMES, torch.max, torch.min], ids=lambda f: f.__name__)
def test_of_the_same_object_twice(f: Callable) -> None:
    x, _ = two()
    result: Any = f(x, x)
    assert result is not x
    assert result.loc.equal(f(x.loc, x.loc)) and result.variance.equal(x.variance)


def test_rectifier() -> None:
    x, _ = two()
    for result in (
        torch.maximum(x, torch.zeros(5)),
        torch.maximum(torch.zeros(()), x),
        x.max(torch.zeros(())),
    ):
        torch.testing.assert_close(result.variance, torch.relu(x).variance)
    assert torch.maximum(x, torch.zeros(5)).link is not None
