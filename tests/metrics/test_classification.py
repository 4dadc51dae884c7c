# SPDX-License-Identifier: Apache-2.0
"""Scores against scikit-learn and plain loops, ties and empty bins included; mistakes are refused."""

import math
from itertools import pairwise, permutations

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss

from pyro_dvi import metrics
from pyro_dvi.errors import ArgumentError, DataError


def problem(seed=0, n=500, classes=4):
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(n, classes)) * 2
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    return p, generator.integers(classes, size=n)


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


def entropy(row):
    return -sum(q * math.log(q) for q in row if q > 0)


def loop_rejection(wrong, uncertainty):
    """Return the errors by the definition: reject one by one, the mean over all orders of equal uncertainties."""
    curves = []
    for order in permutations(range(len(wrong))):
        ranked = [uncertainty[i] for i in order]
        if ranked == sorted(ranked):
            kept = [[wrong[i] for i in order[: len(order) - k]] for k in range(len(order))]
            curves.append([sum(k) / len(k) for k in kept] + [0.0])
    return np.mean(curves, axis=0)


@pytest.mark.parametrize("seed", range(6))
def test_the_rejection_curve_is_the_mean_over_all_orders_of_ties(seed):
    p, y = problem(seed, n=6)
    p[3], p[1] = p[2], p[0]  # equal entropy, but labels of their own
    wrong = list(p.argmax(-1) != y)
    curve = metrics.rejection_curve(p, y)
    np.testing.assert_allclose(curve.rejected, np.arange(7) / 6)
    np.testing.assert_allclose(
        curve.error, loop_rejection(wrong, [round(entropy(r), 12) for r in p]), atol=1e-12
    )
    uncertainty = np.random.default_rng(seed).integers(3, size=6)
    np.testing.assert_allclose(
        metrics.rejection_curve(p, y, uncertainty).error, loop_rejection(wrong, list(uncertainty)), atol=1e-12
    )


def test_the_area_is_that_under_the_loops_curve_and_does_not_depend_on_the_order_of_the_data():
    p, y = problem(n=300)
    order = sorted(range(len(y)), key=lambda i: entropy(p[i]))
    wrong = [float(p[i].argmax() != y[i]) for i in order]
    errors = [sum(wrong[: len(y) - k]) / (len(y) - k) for k in range(len(y))] + [0.0]
    area = sum((a + b) / 2 / len(y) for a, b in pairwise(errors))
    assert metrics.aumrc(p, y) == pytest.approx(area, abs=1e-12)
    steps = np.arange(len(y)) // 50  # six groups of equal uncertainty
    assert metrics.aumrc(p[::-1].copy(), y[::-1].copy(), steps[::-1].copy()) == pytest.approx(
        metrics.aumrc(p, y, steps), abs=1e-12
    )


def test_the_area_of_the_best_the_worst_and_of_no_ranking():
    n, error = 2000, 0.2
    y = np.zeros(n, dtype=int)
    wrong = np.arange(n) < error * n
    p = np.where(wrong[:, None], [0.4, 0.6], [0.6, 0.4])
    best, worst = error + (1 - error) * math.log(1 - error), error - error * math.log(error)
    assert metrics.aumrc(p, y, wrong) == pytest.approx(best, abs=1e-3)
    assert metrics.aumrc(p, y, ~wrong) == pytest.approx(worst, abs=1e-3)
    assert metrics.aumrc(p, y, np.zeros(n)) == pytest.approx(error, abs=1e-3)
    assert metrics.aumrc(p, wrong.astype(int)) == 0.0


@pytest.mark.parametrize("seed", range(4))
def test_the_area_under_the_risk_coverage_curve_and_its_points_are_those_of_a_loop(seed):
    p, y = problem(seed, 60, 3)
    wrong, uncertainty = p.argmax(-1) != y, np.array([entropy(row) for row in p])
    ranked = wrong[np.argsort(uncertainty)]  # no ties
    curve = [np.mean(ranked[: len(y) - k]) for k in range(len(y))] + [0.0]
    assert metrics.aurc(p, y) == pytest.approx(np.mean(curve[:-1]), abs=1e-12)
    for rejected in (0.0, 0.1, 0.25, 0.5, 0.99, 1.0):
        expected = np.interp(rejected, np.arange(len(curve)) / len(y), curve)
        assert metrics.error_at_rejection(p, y, rejected) == pytest.approx(expected, abs=1e-12)


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


def test_entropy_and_mutual_information_are_scipys():
    p, _ = problem(n=30)
    np.testing.assert_allclose(metrics.predictive_entropy(p), scipy.stats.entropy(p, axis=-1), atol=1e-12)
    draws = np.stack([problem(seed, 30)[0] for seed in range(5)])
    expected = [
        np.mean([scipy.stats.entropy(row, mean) for row in rows])  # Kullback-Leibler to the mean
        for rows, mean in zip(draws.transpose(1, 0, 2), draws.mean(0), strict=True)
    ]
    np.testing.assert_allclose(metrics.mutual_information(draws), expected, atol=1e-12)


def test_rejection_takes_probabilities_of_label_one_and_rows_off_by_rounding():
    curve = metrics.rejection_curve([0.9, 0.4], [1, 1])
    assert curve.error.tolist() == [0.5, 0.0, 0.0]
    assert metrics.rejection_curve([[1 + 1e-7, -1e-7], [0.5, 0.5]], [0, 1]).error.tolist() == [0.5, 0.0, 0.0]


def test_single_precision_inputs_are_averaged_in_double():
    p, y = problem(n=5000)
    single = torch.as_tensor(p, dtype=torch.float32)
    assert metrics.brier(single, y) == pytest.approx(metrics.brier(p, y), abs=1e-6)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.integers(1, 30), st.integers(0, 10**6))
def test_the_calibration_error_is_a_number_between_zero_and_one(n, num_bins, seed):
    p, y = problem(seed, n, 3)
    table = metrics.reliability_table(p, y, num_bins)
    assert int(table.count.sum()) == n
    assert 0 <= metrics.expected_calibration_error(p, y, num_bins) <= 1


P, Y = [[0.9, 0.1], [0.4, 0.6]], [0, 1]

MISTAKES = [
    (lambda: metrics.accuracy([[0.9, 0.2], [0.4, 0.6]], Y), DataError, "sum to one.*off by 0.1"),
    (lambda: metrics.brier([[2.0, -1.0], [0.4, 0.6]], Y), DataError, "between -1 and 2.*softmax"),
    (lambda: metrics.accuracy([[math.nan, 0.1], [0.4, 0.6]], Y), DataError, "probabilities holds 1 NaN of 4"),
    (lambda: metrics.accuracy(P, [0, 2]), DataError, "from 0 to 1.*0 to 2"),
    (lambda: metrics.accuracy(P, [0, -1]), DataError, "found values from -1"),
    (lambda: metrics.accuracy(P, [0.5, 1]), DataError, "whole numbers"),
    (lambda: metrics.accuracy(P, [0]), DataError, r"labels of shape \(2,\), not \(1,\)"),
    (lambda: metrics.accuracy(P, [[1, 0], [0, 1]]), DataError, r"one-hot.*argmax"),
    (lambda: metrics.accuracy([], []), DataError, "probabilities is empty"),
    (lambda: metrics.reliability_table(P, Y, 0), ArgumentError, "num_bins must be a positive whole number"),
    (lambda: metrics.expected_calibration_error(P, Y, 1.5), ArgumentError, "not 1.5"),
    (lambda: metrics.rejection_curve(P, Y, [1.0]), DataError, "uncertainty has 1 values for 2 examples"),
    (lambda: metrics.aumrc(P, Y, [1.0, math.nan]), DataError, "uncertainty holds 1 NaN"),
    (lambda: metrics.error_at_rejection(P, Y, 1.5), ArgumentError, "share of the examples between 0 and 1"),
    (lambda: metrics.adaptive_calibration_error(P, Y, 0), ArgumentError, "num_bins must be a positive whole"),
    (lambda: metrics.predictive_entropy([[0.5, 0.6]]), DataError, "off by 0.1"),
    (lambda: metrics.mutual_information([0.5, 0.5]), DataError, "no dimension of draws"),
    (lambda: metrics.predictive_entropy(0.5), DataError, "single number"),
    (lambda: metrics.nll([]), DataError, "log_likelihood is empty"),
    (
        lambda: metrics.nll([math.inf, -1.0]),
        DataError,
        "log_likelihood is plus infinity.*density is infinite",
    ),
    (lambda: metrics.nll([math.nan]), DataError, "log_likelihood holds 1 NaN"),
]


@pytest.mark.parametrize(("mistake", "error", "message"), MISTAKES)
def test_mistakes_are_refused(mistake, error, message):
    with pytest.raises(error, match=message):
        mistake()
