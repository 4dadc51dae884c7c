# SPDX-License-Identifier: Apache-2.0
"""Softmax and its kin against samples, with the errors that the docstrings state."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments import GaussianMoments


class Case(NamedTuple):
    func: Callable


CASES = [
    Case(f)
    for f in (
        torch.softmax,
        F.softmax,
        torch.log_softmax,
        F.log_softmax,
        torch.logsumexp,
        F.gumbel_softmax,
    )
]

# Variance to the errors that are claimed: of the mean of softmax (half the absolute sum), of logsumexp.
CLAIMS = {0.1: (0.002, 0.004), 1.0: (0.015, 0.015), 4.0: (0.075, 0.1)}


def logits(classes: int, level: float, rows: int = 100) -> GaussianMoments:
    generator = torch.Generator().manual_seed(classes)
    loc = 2 * torch.randn(rows, classes, generator=generator, dtype=torch.float64)
    variance = level * (0.05 + 1.9 * torch.rand(rows, classes, generator=generator, dtype=torch.float64))
    return GaussianMoments(loc, variance)


def sampled(function: Callable[[Tensor], Tensor], x: GaussianMoments) -> tuple[Tensor, Tensor]:
    """Mean and variance over 6,000 samples; their error is below 0.004 for all that is measured here."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(6_000, *x.shape, generator=generator, dtype=torch.float64)
    values = function(x.loc + x.variance.sqrt() * noise)
    return values.mean(0), values.var(0)


@pytest.mark.every(2)
@pytest.mark.parametrize("level", CLAIMS)
@pytest.mark.parametrize("classes", [2, 10])
def test_softmax_is_as_good_as_claimed(classes: int, level: float) -> None:
    x = logits(classes, level)
    mean, variance = sampled(lambda v: torch.softmax(v, -1), x)
    y = torch.softmax(x, -1)
    error = (y.loc - mean).abs().sum(-1).mean() / 2
    assert error < CLAIMS[level][0] + 0.002
    naive = (torch.softmax(x.loc, -1) - mean).abs().sum(-1).mean() / 2
    assert error < 0.6 * naive
    ratio = (y.variance.sum(-1) / variance.sum(-1)).sqrt().median()
    assert abs(ratio - 1) < 0.15
    torch.testing.assert_close(y.loc.sum(-1), torch.ones(100, dtype=torch.float64))
    assert (y.variance <= y.loc * (1 - y.loc)).all() and (y.variance > 0).all()


@pytest.mark.every(2)
@pytest.mark.parametrize("level", CLAIMS)
@pytest.mark.parametrize("classes", [2, 10])
def test_logsumexp_and_log_softmax_are_as_good_as_claimed(classes: int, level: float) -> None:
    x = logits(classes, level)
    mean, variance = sampled(lambda v: torch.cat([total := v.logsumexp(-1, keepdim=True), v - total], -1), x)
    y = torch.logsumexp(x, -1)
    assert (y.loc - mean[:, 0]).abs().mean() < CLAIMS[level][1] + 0.003
    assert abs((y.variance / variance[:, 0]).sqrt().median() - 1) < 0.06
    z = torch.log_softmax(x, -1)
    torch.testing.assert_close(z.loc, x.loc - y.loc[:, None])
    assert abs((z.variance / variance[:, 1:]).sqrt().median() - 1) < 0.06


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_certain_logits_give_certain_probabilities(dtype: torch.dtype) -> None:
    m = logits(4, 1.0).loc.to(dtype) * 20  # saturated, too
    x = GaussianMoments(m, torch.zeros_like(m))
    for function in (torch.softmax, torch.log_softmax, torch.logsumexp):
        y = function(x, -1)
        torch.testing.assert_close(y.loc, function(m, -1))
        assert y.variance.eq(0).all()


def test_small_variances_agree_with_the_delta_method() -> None:
    x = logits(4, 1e-6)
    jacobian = torch.func.vmap(torch.func.jacrev(lambda v: torch.softmax(v, -1)))(x.loc)
    expected = (jacobian.square() * x.variance[:, None]).sum(-1)
    torch.testing.assert_close(torch.softmax(x, -1).variance, expected, rtol=1e-4, atol=0)
    expected = ((torch.eye(4) - torch.softmax(x.loc, -1)[:, None]).square() * x.variance[:, None]).sum(-1)
    torch.testing.assert_close(torch.log_softmax(x, -1).variance, expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax, torch.logsumexp])
def test_gradients(function: Callable) -> None:
    x = logits(3, 1.0, rows=2)

    def moments(loc: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        y = function(GaussianMoments(loc, variance), -1)
        return y.loc, y.variance

    assert gradcheck(moments, (x.loc.requires_grad_(), x.variance.requires_grad_()))


@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
def test_extreme_logits_in_float32(function: Callable) -> None:
    loc = torch.tensor([[300.0, 0, -300], [1e-8, 0, 0], [40, 39, -1e4]], requires_grad=True)
    variance = torch.tensor([[1e-10, 100, 1], [1e4, 1e-30, 0], [0, 0, 1e3]], requires_grad=True)
    y = function(GaussianMoments(loc, variance), -1)
    assert y.isfinite().all() and (y.variance >= 0).all()
    (y.loc.sum() + y.variance.sum()).backward()
    assert loc.grad.isfinite().all() and variance.grad.isfinite().all()


def test_masked_logits_have_probability_zero() -> None:
    x = logits(4, 1.0, rows=3).masked_fill(torch.tensor([False, True, False, False]), -torch.inf)
    y = torch.softmax(x, -1)
    rest = torch.softmax(x[:, [0, 2, 3]], -1)
    assert y.loc[:, 1].eq(0).all() and y.variance[:, 1].eq(0).all()
    torch.testing.assert_close(y.loc[:, [0, 2, 3]], rest.loc)
    torch.testing.assert_close(y.variance[:, [0, 2, 3]], rest.variance)


def test_spellings_dimensions_and_dtypes() -> None:
    x = GaussianMoments(torch.randn(2, 3, 4), torch.rand(2, 3, 4))
    for dim in (0, 1, -1):
        expected = torch.softmax(x.movedim(dim, -1), -1).movedim(-1, dim)
        for y in (torch.softmax(x, dim), F.softmax(x, dim=dim), x.softmax(dim)):
            torch.testing.assert_close(y.loc, expected.loc)
            torch.testing.assert_close(y.variance, expected.variance)
    assert F.softmax(x, -1, dtype=torch.float64).variance.dtype is torch.float64
    assert x.log_softmax(-1, dtype=torch.float64).dtype is torch.float64
    assert x.logsumexp(1).shape == (2, 4) and x.logsumexp((1,), True).shape == (2, 1, 4)
    assert torch.nn.Softmax(dim=1)(x).shape == torch.nn.LogSoftmax(dim=1)(x).shape == (2, 3, 4)


@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
def test_probabilities_are_linked_to_their_logits(function: Callable) -> None:
    x = GaussianMoments(torch.randn(2, 3), torch.rand(2, 3))
    link = function(x, 1).link
    assert link.name == function.__name__ and not link.elementwise
    assert link.inner.loc is x.loc and link.inner.variance is x.variance
    value = torch.randn(7, 2, 3)  # samples come in front
    torch.testing.assert_close(link.function(value), function(value, -1))
    assert function(x, 1).t().link is None


def test_softmax_of_something_linked_goes_back_to_the_gaussian() -> None:
    x = GaussianMoments(torch.randn(2, 3), torch.rand(2, 3))
    link = torch.softmax(torch.relu(x), -1).link
    assert link.name is None and not link.elementwise and link.inner.loc is x.loc
    value = torch.randn(7, 2, 3)
    torch.testing.assert_close(link.function(value), torch.softmax(torch.relu(value), -1))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: F.softmax(x), "dim=-1"),
        (lambda x: torch.logsumexp(x, (0, 1)), "one dimension"),
        (lambda x: F.gumbel_softmax(x), "gumbel_softmax has no rule"),
    ],
)
def test_refusals(call: Callable, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        call(GaussianMoments(torch.zeros(2, 3), torch.ones(2, 3)))
