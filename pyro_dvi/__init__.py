# SPDX-License-Identifier: Apache-2.0
"""Deterministic variational inference for Bayesian neural networks in Pyro."""

from pyro_dvi import metrics
from pyro_dvi.bayesian import fan_in, init_to_module, to_bayesian_
from pyro_dvi.predictive import AtMean, Prediction, Samples, predict

__all__ = [
    # Bayesian models
    "to_bayesian_",
    "fan_in",
    "init_to_module",
    # Predictions and their scores
    "predict",
    "AtMean",
    "Samples",
    "Prediction",
    "metrics",
]
