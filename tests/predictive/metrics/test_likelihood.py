# SPDX-License-Identifier: Apache-2.0
"""The log score against scikit-learn."""

import math

import numpy as np
import pytest
from sklearn.metrics import log_loss

from pyro_dvi import metrics
from tests.predictive.metrics.examples import problem


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
