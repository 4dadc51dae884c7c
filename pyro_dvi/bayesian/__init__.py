# SPDX-License-Identifier: Apache-2.0
"""Bayesian models from torch modules: priors over weights, likelihoods, and conversion back to plain modules."""

from pyro_dvi.bayesian.conversion import to_bayesian_, to_deterministic
from pyro_dvi.bayesian.converted import init_to_module
from pyro_dvi.bayesian.likelihoods import Classifier, Heteroscedastic, classifier, regressor
from pyro_dvi.bayesian.overview import summary
from pyro_dvi.bayesian.priors import HierarchicalScale, LearnedScale, OptimalScale, fan_in
from pyro_dvi.bayesian.smoothing import smooth_activations_

__all__ = [
    "Classifier",
    "Heteroscedastic",
    "HierarchicalScale",
    "LearnedScale",
    "OptimalScale",
    "classifier",
    "fan_in",
    "init_to_module",
    "regressor",
    "smooth_activations_",
    "summary",
    "to_bayesian_",
    "to_deterministic",
]
