# SPDX-License-Identifier: Apache-2.0
"""Bayesian models from torch modules: priors over weights, likelihoods around them, and the way back."""

from pyro_dvi.bayesian.conversion import to_bayesian_, to_deterministic
from pyro_dvi.bayesian.converted import init_to_module
from pyro_dvi.bayesian.likelihoods import Classifier, Heteroscedastic, Regressor, classifier, regressor
from pyro_dvi.bayesian.overview import SiteSummary, Summary, summary
from pyro_dvi.bayesian.prior_scales import FanIn, HierarchicalScale, LearnedScale, fan_in
from pyro_dvi.bayesian.priors import Prior
from pyro_dvi.bayesian.selection import DEFAULT_LAYERS, NORM_LAYERS
from pyro_dvi.bayesian.smoothing import SMOOTH, SmoothClamp, SmoothLeakyReLU, smooth_activations_

__all__ = [
    "DEFAULT_LAYERS",
    "NORM_LAYERS",
    "SMOOTH",
    "Classifier",
    "FanIn",
    "Heteroscedastic",
    "HierarchicalScale",
    "LearnedScale",
    "Prior",
    "Regressor",
    "SiteSummary",
    "SmoothClamp",
    "SmoothLeakyReLU",
    "Summary",
    "classifier",
    "fan_in",
    "init_to_module",
    "regressor",
    "smooth_activations_",
    "summary",
    "to_bayesian_",
    "to_deterministic",
]
