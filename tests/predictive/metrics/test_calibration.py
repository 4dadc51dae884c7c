# SPDX-License-Identifier: Apache-2.0
"""Calibration against loops over bins and ranks, empty bins and ties included."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyro_dvi import metrics
from tests.predictive.metrics.examples import problem


def loop_reliability(p, labels, num_bins):
    """Return rows (confidence, accuracy, count) by the definition: bin b holds (b/B, (b+1)/B]."""
    rows = []
    for b in range(num_bins):
        inside = [
            (row.max(), row.argmax() == label)
            for row, label in zip(p, labels, strict=True)
            if b / num_bins < row.max() <= (b + 1) / num_bins
        ]
        confidences, hits = zip(*inside, strict=True) if inside else ([math.nan], [math.nan])
        rows.append((np.mean(confidences), np.mean(hits), len(inside)))
    return rows


@pytest.mark.parametrize("num_bins", [1, 2, 15, 20])
@pytest.mark.parametrize("seed", [0, 1])
def test_calibration_is_what_a_loop_over_bins_gives(num_bins, seed):
    p, y = problem(seed, n=200)
    rows = loop_reliability(p, y, num_bins)
    table = metrics.reliability_table(p, y, num_bins)
    np.testing.assert_allclose(table.confidence, [r[0] for r in rows], atol=1e-12)
    np.testing.assert_allclose(table.accuracy, [r[1] for r in rows], atol=1e-12)
    np.testing.assert_array_equal(table.count, [r[2] for r in rows])
    expected = sum(abs(c - a) * n / len(y) for c, a, n in rows if n)
    assert metrics.expected_calibration_error(p, y, num_bins) == pytest.approx(expected, abs=1e-12)


def test_confidences_on_an_edge_belong_to_the_bin_below():
    p = [[0.5, 0.5], [1.0, 0.0], [0.75, 0.25]]
    table = metrics.reliability_table(p, [0, 0, 1], num_bins=4)
    assert table.count.tolist() == [0, 1, 1, 1]
    assert table.edges.tolist() == [0, 0.25, 0.5, 0.75, 1]


@pytest.mark.parametrize("num_bins", [1, 7, 15, 100])
def test_adaptive_calibration_is_what_a_loop_over_ranks_gives(num_bins):
    p, y = problem(n=80)
    order = np.argsort(p.max(-1))
    parts = np.array_split(order, num_bins)
    gaps = [abs(sum(p[i].max() - (p[i].argmax() == y[i]) for i in part)) / len(y) for part in parts]
    assert metrics.adaptive_calibration_error(p, y, num_bins) == pytest.approx(sum(gaps), abs=1e-12)


def test_adaptive_calibration_does_not_depend_on_the_order_of_equal_confidences():
    p = np.repeat([[0.7, 0.3]], 20, 0)
    y = np.array([0] * 14 + [1] * 6)
    assert metrics.adaptive_calibration_error(p, y, 5) == pytest.approx(0, abs=1e-12)
    assert metrics.adaptive_calibration_error(p, y[::-1].copy(), 5) == pytest.approx(0, abs=1e-12)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.integers(1, 30), st.integers(0, 10**6))
def test_the_calibration_error_is_a_number_between_zero_and_one(n, num_bins, seed):
    p, y = problem(seed, n, 3)
    table = metrics.reliability_table(p, y, num_bins)
    assert int(table.count.sum()) == n
    assert 0 <= metrics.expected_calibration_error(p, y, num_bins) <= 1
