# SPDX-License-Identifier: Apache-2.0
"""Predictions of a trained model: at the posterior mean, or averaged over draws."""

from pyro_dvi.predictive.predict import predict
from pyro_dvi.predictive.prediction import Prediction
from pyro_dvi.predictive.predictor import predictor
from pyro_dvi.predictive.rules.analytic import FullCovariance, Independent, Linearised, Moments, ReverseDelta
from pyro_dvi.predictive.rules.rule import AtMean, PredictionRule, Samples

__all__ = [
    "AtMean",
    "FullCovariance",
    "Independent",
    "Linearised",
    "Moments",
    "Prediction",
    "PredictionRule",
    "ReverseDelta",
    "Samples",
    "predict",
    "predictor",
]
