# SPDX-License-Identifier: Apache-2.0
"""Entropy and mutual information against SciPy."""

import numpy as np
import scipy.stats

from pyro_dvi import metrics
from tests.predictive.metrics.examples import problem


def test_entropy_and_mutual_information_are_scipys():
    p, _ = problem(n=30)
    np.testing.assert_allclose(metrics.predictive_entropy(p), scipy.stats.entropy(p, axis=-1), atol=1e-12)
    draws = np.stack([problem(seed, 30)[0] for seed in range(5)])
    expected = [
        np.mean([scipy.stats.entropy(row, mean) for row in rows])  # Kullback-Leibler to the mean
        for rows, mean in zip(draws.transpose(1, 0, 2), draws.mean(0), strict=True)
    ]
    np.testing.assert_allclose(metrics.mutual_information(draws), expected, atol=1e-12)
