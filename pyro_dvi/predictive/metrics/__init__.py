# SPDX-License-Identifier: Apache-2.0
r"""Scores of predictions: how likely, how accurate, how calibrated, how watchful.

Every function takes what a prediction consists of (probabilities, means, log-likelihoods) and what was observed, as
tensors or anything that ``torch.as_tensor`` accepts, and computes in double precision. Probabilities have their
classes in the last dimension, ``[..., C]`` with labels ``[...]``; where labels are two-valued, probabilities of label
1 alone, of the labels' shape, will do. What cannot be right (NaN, rows that do not sum to one, labels out of range)
raises a :class:`~pyro_dvi.errors.DataError` instead of giving a number.
"""

from pyro_dvi.predictive.metrics.classification import (
    accuracy,
    adaptive_calibration_error,
    brier,
    expected_calibration_error,
    predictive_entropy,
    reliability_table,
)
from pyro_dvi.predictive.metrics.ranking import aumrc, auroc, error_at_rejection, fpr_at_tpr, rejection_curve
from pyro_dvi.predictive.metrics.scoring import Estimate, coverage, crps_gaussian, interval_width, nll, rmse

__all__ = [
    "Estimate",
    "accuracy",
    "adaptive_calibration_error",
    "aumrc",
    "auroc",
    "brier",
    "coverage",
    "crps_gaussian",
    "error_at_rejection",
    "expected_calibration_error",
    "fpr_at_tpr",
    "interval_width",
    "nll",
    "predictive_entropy",
    "rejection_curve",
    "reliability_table",
    "rmse",
]
