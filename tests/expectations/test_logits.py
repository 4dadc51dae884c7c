# SPDX-License-Identifier: Apache-2.0
"""Estimators of the expected log-normaliser against a fine quasi-random average."""

import math
from functools import lru_cache

import pyro
import pytest
import torch
from torch import Tensor

from pyro_dvi.errors import ArgumentError
from pyro_dvi.expectations import Sobol, TiltedBound, logits
from pyro_dvi.expectations.logits import LogitEstimator
from pyro_dvi.expectations.points import shifted_sobol
from pyro_dvi.moments import GaussianMoments

ESTIMATORS = [Sobol(), TiltedBound()]
every_estimator = pytest.mark.parametrize("estimator", ESTIMATORS, ids=repr)


def problem(variance: float, num_classes: int = 10, num_examples: int = 32) -> GaussianMoments:
    generator = torch.Generator().manual_seed(5)
    loc = 1.5 * torch.randn(num_examples, num_classes, generator=generator, dtype=torch.float64)
    spread = torch.rand(loc.shape, generator=generator, dtype=torch.float64) + 0.5
    return GaussianMoments(loc, variance * spread)


@lru_cache
def reference(variance: float, num_examples: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    """The mean of the log-normaliser of the problem and its derivatives, by 2^15 points."""
    x, num_points = problem(variance, num_examples=num_examples), 2**15
    points = shifted_sobol(num_points, x.shape[-1], x.loc)
    total, first, second = (torch.zeros(x.shape[:-1]).double(), *torch.zeros(2, *x.shape).double())
    for chunk in points.split(2048):
        values = x.loc + x.variance.sqrt() * chunk[:, None]
        p = torch.softmax(values, -1)
        total, first, second = (
            total + torch.logsumexp(values, -1).sum(0),
            first + p.sum(0),
            second + (p - p**2).sum(0),
        )
    return total / num_points, first / num_points, second / (2 * num_points)


def with_gradients(estimator: LogitEstimator, x: GaussianMoments) -> tuple[Tensor, Tensor, Tensor]:
    loc, variance = x.loc.clone().requires_grad_(), x.variance.clone().requires_grad_()
    value = estimator.expected_logsumexp(GaussianMoments(loc, variance))
    return value.detach(), *torch.autograd.grad(value.sum(), (loc, variance))


def test_many_points_give_the_expectation_and_its_gradient():
    for ours, exact in zip(with_gradients(Sobol(2**12), problem(1.0)), reference(1.0), strict=True):
        torch.testing.assert_close(ours, exact, atol=2e-3, rtol=0)


@pytest.mark.parametrize(
    ("estimator", "variance", "low", "high"),
    [  # root mean squared error of one example; the bands tell a broken estimator from a good one
        (Sobol(64), 1.0, 0.005, 0.015),
        (Sobol(64), 0.1, 0.0005, 0.003),
    ],
    ids=str,
)
def test_error_of_few_points(estimator, variance, low, high):
    x = problem(variance)
    exact = reference(variance)[0]
    errors = torch.stack([estimator.expected_logsumexp(x) - exact for _ in range(60)])
    assert low < errors.square().mean().sqrt() < high


def test_few_points_are_unbiased():
    """A z-test over 1,000 calls; fails by chance less than once in 10^4 (and the seed is fixed)."""
    x = problem(1.0, num_examples=1)
    exact = reference(1.0, num_examples=1)[0]
    errors = torch.stack([Sobol(16).expected_logsumexp(x) - exact for _ in range(1000)])
    assert errors.mean().abs() < 4 * errors.std() / math.sqrt(1000) + 2e-4


@pytest.mark.every(3)
@pytest.mark.parametrize("variance", [0.0, 0.01, 1.0, 10.0, 100.0])
@pytest.mark.parametrize("num_iterations", [1, 6])
def test_the_tilted_bound_is_a_bound(variance, num_iterations):
    x = problem(variance)
    bound = TiltedBound(num_iterations).expected_logsumexp(x)
    assert (bound > reference(variance)[0] - 1e-4 * (1 + variance)).all()


def test_the_tilt_is_the_best():
    x = problem(4.0)
    a = TiltedBound()._tilt(x.loc, x.variance)
    torch.testing.assert_close(a, torch.softmax(x.loc + (0.5 - a) * x.variance, -1), atol=1e-8, rtol=0)
    excess = TiltedBound().expected_logsumexp(problem(1.0)) - reference(1.0)[0]
    assert 0.02 < excess.mean() < 0.05


def test_gradients_of_the_tilted_bound():
    x = problem(2.0, num_examples=2)
    arguments = (x.loc.requires_grad_(), x.variance.requires_grad_())
    assert torch.autograd.gradcheck(
        lambda m, v: TiltedBound(8).expected_logsumexp(GaussianMoments(m, v)), arguments
    )


@every_estimator
def test_the_certain_limit(estimator):
    x = GaussianMoments(problem(1.0).loc, torch.zeros(32, 10).double())
    value, slope, curvature = with_gradients(estimator, x)
    p = torch.softmax(x.loc, -1)
    torch.testing.assert_close(value, torch.logsumexp(x.loc, -1))
    torch.testing.assert_close(slope, p)
    torch.testing.assert_close(curvature, 0.5 * p * (1 - p))


@every_estimator
def test_small_variances_keep_the_digits_of_the_gradient_in_float32(estimator):
    x = GaussianMoments(problem(1.0).loc.float(), torch.full((32, 10), 1e-8))
    p = torch.softmax(x.loc, -1)
    torch.testing.assert_close(with_gradients(estimator, x)[2], 0.5 * p * (1 - p), atol=1e-4, rtol=1e-3)


@every_estimator
def test_extreme_logits_stay_finite(estimator):
    x = GaussianMoments(torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]]), torch.full((2, 3), 100.0))
    for part in with_gradients(estimator, x):
        assert part.isfinite().all()


@every_estimator
def test_any_number_of_batch_dimensions(estimator):
    x = problem(1.0)
    assert estimator.expected_logsumexp(GaussianMoments(x.loc[0], x.variance[0])).shape == ()
    many = GaussianMoments(x.loc.reshape(4, 8, 10), x.variance.reshape(4, 8, 10))
    assert estimator.expected_logsumexp(many).shape == (4, 8)


def test_parts_and_seeds(monkeypatch):
    x = problem(1.0)
    results = []
    for chunk in (2**20, 1000):
        monkeypatch.setattr(logits, "_CHUNK", chunk)
        pyro.set_rng_seed(3)
        results.append(with_gradients(Sobol(), x))
    torch.testing.assert_close(*results)
    assert not torch.equal(with_gradients(Sobol(), x)[0], results[1][0])


def test_mistakes_are_refused():
    for make in (Sobol, TiltedBound):
        with pytest.raises(ArgumentError, match="must be a positive whole number, not 0"):
            make(0)
