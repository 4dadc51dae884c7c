# SPDX-License-Identifier: Apache-2.0
"""The log score against scikit-learn; scores of numbers against scikit-learn, quadrature and loops."""

import math

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
from sklearn.metrics import log_loss, root_mean_squared_error

from pyro_dvi import metrics
from pyro_dvi.errors import DataError
from tests.predictive.metric_examples import problem


def test_nll_is_scikit_learns_log_loss_and_has_the_textbook_standard_error():
    p, y = problem()
    log_likelihood = np.log(p[np.arange(len(y)), y])
    score = metrics.nll(log_likelihood)
    assert score.value == pytest.approx(log_loss(y, p, labels=range(4)), abs=1e-12)
    assert score.standard_error == pytest.approx(
        np.std(log_likelihood, ddof=1) / math.sqrt(len(y)), abs=1e-12
    )
    assert float(score) == score.value
    assert math.isnan(metrics.nll([-1.0]).standard_error)
    assert metrics.nll([-math.inf, -1.0]).value == math.inf


def test_rmse_is_scikit_learns():
    rng = np.random.default_rng(0)
    m, y = rng.normal(size=50), rng.normal(size=50)
    assert metrics.rmse(m, y) == pytest.approx(root_mean_squared_error(y, m), rel=1e-12)


def test_coverage_is_that_of_a_loop_with_limits_inside():
    rng = np.random.default_rng(1)
    y = np.round(rng.normal(size=200), 1)
    low = np.round(rng.normal(size=200) - 1, 1)
    high = low + np.round(rng.uniform(0, 2, size=200), 1)
    inside = [a <= v <= b for a, v, b in zip(low, y, high, strict=True)]
    assert metrics.coverage(low, high, y) == pytest.approx(np.mean(inside), abs=1e-12)
    assert metrics.coverage([1.0], [1.0], [1.0]) == 1


def crps_by_quadrature(cdf, y, width=40.0):
    below = scipy.integrate.quad(lambda t: cdf(t) ** 2, y - width, y, limit=500)[0]
    above = scipy.integrate.quad(lambda t: (1 - cdf(t)) ** 2, y, y + width, limit=500)[0]
    return below + above


@pytest.mark.parametrize(("mean", "scale", "y"), [(0, 1, 0), (0.3, 2, -1), (-1, 0.5, 2), (0, 3, 10)])
def test_the_gaussian_score_is_the_integral_of_its_definition(mean, scale, y):
    expected = crps_by_quadrature(scipy.stats.norm(mean, scale).cdf, y)
    assert metrics.crps_gaussian([mean], [scale], [y]) == pytest.approx(expected, abs=1e-7)


def test_a_certain_prediction_scores_its_absolute_error():
    assert metrics.crps_gaussian([1.0, 2.0], [0.0, 0.0], [3.0, 2.0]) == pytest.approx(1.0, abs=1e-12)


MISTAKES = [
    (lambda: metrics.rmse(np.zeros(3), np.zeros((3, 1))), r"shape \(3,\) and observed has shape \(3, 1\)"),
    (lambda: metrics.rmse([math.nan], [0.0]), "1 of the 1 values of mean"),
    (lambda: metrics.coverage([1.0], [0.0], [0.5]), "1 of 1 lower limits exceed"),
    (lambda: metrics.coverage([0.0], [1.0], [[0.5]]), "must be equal"),
    (lambda: metrics.crps_gaussian([0.0], [-1.0], [0.0]), "must not be negative; its minimum is -1"),
]


@pytest.mark.parametrize(("mistake", "message"), MISTAKES)
def test_mistakes_are_refused(mistake, message):
    with pytest.raises(DataError, match=message):
        mistake()
