# SPDX-License-Identifier: Apache-2.0
"""Predictions of classes that are none, and options that cannot be: the exception and what it names."""

import math

import pytest

from pyro_dvi import metrics
from pyro_dvi.errors import ArgumentError, DataError

P, Y = [[0.9, 0.1], [0.4, 0.6]], [0, 1]


MISTAKES = [
    (lambda: metrics.accuracy([[0.9, 0.2], [0.4, 0.6]], Y), DataError, "sum to one.*differs by 0.1"),
    (lambda: metrics.brier([[2.0, -1.0], [0.4, 0.6]], Y), DataError, "between -1 and 2.*softmax"),
    (
        lambda: metrics.accuracy([[math.nan, 0.1], [0.4, 0.6]], Y),
        DataError,
        "1 of the 4 values of probabilities are NaN",
    ),
    (lambda: metrics.accuracy(P, [0, 2]), DataError, "from 0 to 1.*0 to 2"),
    (lambda: metrics.accuracy(P, [0, -1]), DataError, "found -1 to"),
    (lambda: metrics.accuracy(P, [0.5, 1]), DataError, "whole numbers"),
    (lambda: metrics.accuracy(P, [0]), DataError, r"labels of shape \(2,\), not \(1,\)"),
    (lambda: metrics.accuracy(P, [[1, 0], [0, 1]]), DataError, r"one-hot.*argmax"),
    (lambda: metrics.accuracy([], []), DataError, "probabilities is empty"),
    (lambda: metrics.reliability_table(P, Y, 0), ArgumentError, "num_bins must be a positive whole number"),
    (lambda: metrics.expected_calibration_error(P, Y, 1.5), ArgumentError, "not 1.5"),
    (lambda: metrics.rejection_curve(P, Y, [1.0]), DataError, "uncertainty has 1 values for 2 examples"),
    (lambda: metrics.aumrc(P, Y, [1.0, math.nan]), DataError, "1 of the 2 values of uncertainty"),
    (lambda: metrics.misclassification_auroc(P, Y), DataError, "all predictions are right"),
    (lambda: metrics.misclassification_auroc(P, [1, 0]), DataError, "all predictions are wrong"),
    (lambda: metrics.misclassification_auroc(P, Y, [1.0]), DataError, "uncertainty has 1 values"),
    (lambda: metrics.nll([]), DataError, "log_likelihood is empty"),
    (lambda: metrics.nll([math.nan]), DataError, "1 of the 1 values of log_likelihood"),
]


@pytest.mark.parametrize(("mistake", "error", "message"), MISTAKES)
def test_mistakes_are_refused(mistake, error, message):
    with pytest.raises(error, match=message):
        mistake()
