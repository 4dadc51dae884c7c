# SPDX-License-Identifier: Apache-2.0
"""Accuracy and Brier score against scikit-learn, calibration against loops over bins."""

import math
import random

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, brier_score_loss

from pyro_dvi import metrics
from tests.predictive.metric_examples import problem


def test_accuracy_is_scikit_learns_and_ties_go_to_the_first_class():
    p, y = problem()
    assert metrics.accuracy(p, y) == pytest.approx(accuracy_score(y, p.argmax(-1)), abs=1e-12)
    assert metrics.accuracy([[0.5, 0.5]], [0]) == 1.0
    assert metrics.accuracy([[0.5, 0.5]], [1]) == 0.0


def test_brier_is_scikit_learns():
    p, y = problem(classes=2)
    assert metrics.brier(p, y) == pytest.approx(2 * brier_score_loss(y, p[:, 1]), abs=1e-12)
    p, y = problem()
    by_hand = np.mean(
        [sum((row[c] - (c == label)) ** 2 for c in range(4)) for row, label in zip(p, y, strict=True)]
    )
    assert metrics.brier(p, y) == pytest.approx(by_hand, abs=1e-12)


def test_a_single_class_and_certain_predictions():
    assert metrics.accuracy([[1.0], [1.0]], [0, 0]) == 1.0
    assert metrics.expected_calibration_error([[1.0], [1.0]], [0, 0]) == 0.0
    assert metrics.brier([[0.0, 1.0]], [0]) == 2.0


def test_probabilities_of_label_one_are_enough_for_two_classes():
    p = torch.rand(50)
    y = torch.randint(2, (50,))
    both = torch.stack([1 - p, p], -1)
    for score in (metrics.accuracy, metrics.brier, metrics.expected_calibration_error):
        assert score(p, y) == pytest.approx(score(both, y), abs=1e-7)
        assert score(p, y.float()) == score(p, y.bool()) == score(p, y)


def test_further_dimensions_count_as_further_examples():
    p, y = problem(n=60)
    wide_p, wide_y = p.reshape(12, 5, 4), y.reshape(12, 5)
    for score in (metrics.accuracy, metrics.brier, metrics.expected_calibration_error, metrics.aumrc):
        assert score(wide_p, wide_y) == pytest.approx(score(p, y), abs=1e-12)


def test_single_precision_inputs_are_averaged_in_double():
    p, y = problem(n=5000)
    single = torch.as_tensor(p, dtype=torch.float32)
    assert metrics.brier(single, y) == pytest.approx(metrics.brier(p, y), abs=1e-6)


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


def test_the_calibration_error_is_a_number_between_zero_and_one():
    for seed in range(50):
        n, num_bins = random.randint(1, 40), random.randint(1, 30)
        p, y = problem(seed, n, 3)
        table = metrics.reliability_table(p, y, num_bins)
        assert int(table.count.sum()) == n
        assert 0 <= metrics.expected_calibration_error(p, y, num_bins) <= 1
