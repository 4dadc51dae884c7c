# SPDX-License-Identifier: Apache-2.0
"""Rejection curves against every order of ties; detection against scikit-learn's ROC curve."""

import math
from itertools import pairwise, permutations

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score, roc_curve

from pyro_dvi import metrics
from pyro_dvi.errors import DataError
from tests.predictive.metric_examples import entropy, problem


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
    assert metrics.aumrc(p, y) == pytest.approx(sum(errors) / len(y), abs=1e-12)
    assert metrics.aumrc(p, y) == pytest.approx(area + errors[0] / (2 * len(y)), abs=1e-12)
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
    assert metrics.aumrc(p, y) == pytest.approx(np.mean(curve[:-1]), abs=1e-12)
    np.testing.assert_allclose(metrics.rejection_curve(p, y).error, curve, atol=1e-12)


def test_rejection_takes_probabilities_of_label_one_and_rows_off_by_rounding():
    curve = metrics.rejection_curve([0.9, 0.4], [1, 1])
    assert curve.error.tolist() == [0.5, 0.0, 0.0]
    assert metrics.rejection_curve([[1 + 1e-7, -1e-7], [0.5, 0.5]], [0, 1]).error.tolist() == [0.5, 0.0, 0.0]


def scores(seed, digits):
    rng = np.random.default_rng(seed)
    return np.round(rng.normal(size=83), digits), np.round(rng.normal(size=61) + 1, digits)


@pytest.mark.parametrize("digits", [0, 1, 8])
@pytest.mark.parametrize("seed", range(3))
def test_the_area_is_scikit_learns(seed, digits):
    inside, outside = scores(seed, digits)
    labels = np.r_[np.zeros(len(inside)), np.ones(len(outside))]
    expected = roc_auc_score(labels, np.r_[inside, outside])
    assert metrics.auroc(inside, outside) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_wrong_predictions_are_told_from_right_ones_as_by_scikit_learn(seed):
    p, y = problem(seed, n=200)
    p[:50] = p[0]  # ties
    wrong, uncertain = p.argmax(-1) != y, [entropy(row) for row in p]
    assert metrics.misclassification_auroc(p, y) == pytest.approx(roc_auc_score(wrong, -p.max(-1)), abs=1e-12)
    by_entropy = metrics.misclassification_auroc(p, y, uncertain)
    assert by_entropy == pytest.approx(roc_auc_score(wrong, uncertain), abs=1e-12)
    assert metrics.misclassification_auroc(p, y, wrong) == 1


def test_two_wrong_predictions_beside_two_right_ones():
    assert (
        metrics.misclassification_auroc([0.9, 0.6, 0.8, 0.3], [1, 1, 0, 1]) == 0.5
    )  # 0.7 is the fourth confidence
    assert metrics.misclassification_auroc([0.9, 0.6, 0.8, 0.3], [1, 0, 0, 0]) == 0.75
    assert metrics.misclassification_auroc([0.9, 0.6, 0.8, 0.3], [1, 0, 1, 1]) == 1


@pytest.mark.parametrize("tpr", [0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("digits", [0, 1, 8])
def test_the_rate_is_read_off_scikit_learns_curve(digits, tpr):
    inside, outside = scores(5, digits)
    labels = np.r_[np.ones(len(inside)), np.zeros(len(outside))]  # familiar examples are the positives
    false, true, _ = roc_curve(labels, -np.r_[inside, outside], drop_intermediate=False)
    assert metrics.fpr_at_tpr(inside, outside, tpr) == pytest.approx(false[true >= tpr][0], abs=1e-12)


def test_perfect_useless_and_reversed_detection():
    assert metrics.auroc([0.0, 1.0], [2.0]) == 1
    assert metrics.auroc([1.0, 1.0], [1.0]) == 0.5
    assert metrics.auroc([2.0], [0.0, 1.0]) == 0
    assert metrics.fpr_at_tpr([0.0, 1.0], [2.0]) == 0
    assert metrics.fpr_at_tpr([1.0], [1.0]) == 1


def test_nineteen_of_twenty_are_ninety_five_per_cent():
    assert metrics.fpr_at_tpr(np.arange(20.0), [18.5]) == 0


def test_mistakes_are_refused():
    with pytest.raises(DataError, match="outside is empty"):
        metrics.auroc([1.0], [])
    with pytest.raises(DataError, match="values of inside are NaN"):
        metrics.fpr_at_tpr([np.nan], [1.0])
