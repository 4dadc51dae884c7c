# SPDX-License-Identifier: Apache-2.0
"""Predictions of a trained model: at the posterior mean, or averaged over draws."""

from pyro_dvi.predictive.calibration import Calibrated, calibrate
from pyro_dvi.predictive.linearised import Linearised
from pyro_dvi.predictive.moments import Moments
from pyro_dvi.predictive.predict import predict
from pyro_dvi.predictive.prediction import Prediction
from pyro_dvi.predictive.propagation import Independent, Propagation, ReverseDelta
from pyro_dvi.predictive.rules import AtMean, PredictionRule, Samples
from pyro_dvi.predictive.validation import ByValidation

__all__ = [
    "AtMean",
    "ByValidation",
    "Calibrated",
    "Independent",
    "Linearised",
    "Moments",
    "Prediction",
    "PredictionRule",
    "Propagation",
    "ReverseDelta",
    "Samples",
    "calibrate",
    "predict",
]
