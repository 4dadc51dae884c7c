# SPDX-License-Identifier: Apache-2.0
"""Accuracy and the Brier score against scikit-learn, and the forms of probabilities that all scores of classes take."""

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, brier_score_loss

from pyro_dvi import metrics
from tests.predictive.metrics.examples import problem


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
