# SPDX-License-Identifier: Apache-2.0
"""Detection of foreign examples against scikit-learn's ROC curve, with ties and single values."""

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score, roc_curve

from pyro_dvi import metrics
from pyro_dvi.errors import ArgumentError, DataError


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
    with pytest.raises(DataError, match="inside holds 1 NaN"):
        metrics.fpr_at_tpr([np.nan], [1.0])
    with pytest.raises(ArgumentError, match="share above 0"):
        metrics.fpr_at_tpr([1.0], [1.0], tpr=95)
