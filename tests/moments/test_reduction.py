# SPDX-License-Identifier: Apache-2.0
"""Extremes take the element with the largest mean; norms against sampling, or in closed form where there is one."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments import GaussianMoments
from tests.moments.battery import CHECKS, Case, Oracle, name_of_check


def of_the(choose: Callable) -> Oracle:
    def oracle(loc: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        index = choose(loc.flatten(), 0)
        return loc.flatten()[index], variance.flatten()[index]

    return oracle


def by_sampling(f: Callable, samples: int = 400_000) -> Oracle:
    def oracle(loc: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.randn(samples, *loc.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        values = torch.func.vmap(f)(loc + variance.sqrt() * z)
        return values.mean(0), values.var(0)

    return oracle


OF_NORMS: dict[str, Any] = {"shape": (3, 4), "oracle": by_sampling(torch.norm), "tolerance": (0.02, 0.02)}
CASES = [
    *(Case(f, shape=(3, 4), oracle=of_the(torch.argmax)) for f in (torch.max, torch.amax)),
    *(Case(f, shape=(3, 4), oracle=of_the(torch.argmin)) for f in (torch.min, torch.amin)),
    *(Case(f, **OF_NORMS) for f in (torch.norm, torch.linalg.vector_norm)),
]


@pytest.mark.parametrize("check", CHECKS, ids=name_of_check)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule(case: Case, check: Callable[[Case], None]) -> None:
    check(case)


def gaussian(*shape: int) -> GaussianMoments:
    generator = torch.Generator().manual_seed(0)
    loc, variance = (f(shape, generator=generator, dtype=torch.float64) for f in (torch.randn, torch.rand))
    return GaussianMoments(loc, variance)


# --- extremes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("f", [torch.max, torch.min], ids=lambda f: f.__name__)
def test_over_a_dimension_the_index_is_that_of_the_means(f: Callable, keepdim: bool) -> None:
    x = gaussian(3, 4)
    values, index = f(x, 1, keepdim)
    expected = f(x.loc, 1, keepdim)
    assert values.loc.equal(expected.values) and index.equal(expected.indices)
    rows = index if keepdim else index[:, None]
    assert values.variance.flatten().equal(x.variance.gather(1, rows).flatten())
    assert f(x, dim=-1).values.variance.shape == (3,)


@pytest.mark.parametrize("dim", [0, -1, (0, 2), (), [1]])
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("f", [torch.amax, torch.amin], ids=lambda f: f.__name__)
def test_over_several_dimensions(f: Callable, dim: Any, keepdim: bool) -> None:
    x = gaussian(2, 3, 4)
    y = f(x, dim, keepdim)
    assert y.loc.equal(f(x.loc, dim, keepdim))
    assert y.variance.equal(
        torch.where(x.loc == f(x.loc, dim, True), x.variance, 0).sum(None if dim == () else dim, keepdim)
    )


# --- norms ---------------------------------------------------------------------------------------------------


@pytest.mark.every(4)
@pytest.mark.parametrize("spread", [0.01, 1.0, 10.0])
@pytest.mark.parametrize("size", [1, 2, 20])
def test_euclidean_norms_are_as_good_as_claimed(size: int, spread: float) -> None:
    x = gaussian(20, size)
    x = GaussianMoments(x.loc, spread * x.variance)
    mean, variance = by_sampling(lambda v: v.square().sum(-1).sqrt(), 20_000)(x.loc, x.variance)
    y = torch.linalg.vector_norm(x, dim=-1)
    error = 5 * (variance / 20_000).sqrt()
    assert ((y.loc - mean).abs() <= 0.05 * mean + error).all()
    assert ((y.variance / variance).sqrt() - 1).abs().max() <= 0.15


def test_the_norm_of_noise_is_that_of_chi() -> None:
    n = torch.tensor([2.0, 5.0, 20.0], dtype=torch.float64)
    for k in n:
        x = GaussianMoments(torch.zeros(int(k), dtype=torch.float64), torch.ones(int(k), dtype=torch.float64))
        mean = math.sqrt(2) * torch.exp(torch.lgamma((k + 1) / 2) - torch.lgamma(k / 2))
        torch.testing.assert_close(x.norm().loc, mean, rtol=0.01, atol=0)
        torch.testing.assert_close(x.norm().variance, k - mean.square(), rtol=0.03, atol=0)


def test_dimensions_and_dtype_of_a_norm() -> None:
    x = gaussian(3, 4)
    assert x.norm(dim=(0, 1), keepdim=True).shape == (1, 1)
    assert torch.linalg.vector_norm(x, ord=2).loc.equal(x.norm(p=2).loc)
    assert x.norm(dtype=torch.float32).dtype is torch.float32


def test_a_vector_of_zeros_has_gradients() -> None:
    loc, variance = torch.zeros(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    y = GaussianMoments(loc, variance).norm()
    (y.loc + y.variance).backward()
    assert loc.grad.isfinite().all() and variance.grad.isfinite().all()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: x.norm(3), "order 3"),
        (lambda x: torch.linalg.vector_norm(x, ord=1), "x.abs"),
        (lambda x: torch.linalg.norm(x), "no rule"),
    ],
)
def test_other_norms_are_refused(call: Callable, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        call(gaussian(3, 4))
