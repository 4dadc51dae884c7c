# SPDX-License-Identifier: Apache-2.0
"""Bayesian models from torch modules: priors over weights, likelihoods around them, and the way back."""

from pyro_dvi.bayesian.convert import to_bayesian_
from pyro_dvi.bayesian.he_scaling import FanIn, fan_in
from pyro_dvi.bayesian.initial_values import init_to_module
from pyro_dvi.bayesian.priors import Prior
from pyro_dvi.bayesian.scales import HierarchicalScale, LearnedScale
from pyro_dvi.bayesian.selection import DEFAULT_LAYERS, NORM_LAYERS

__all__ = [
    "DEFAULT_LAYERS",
    "NORM_LAYERS",
    "FanIn",
    "HierarchicalScale",
    "LearnedScale",
    "Prior",
    "fan_in",
    "init_to_module",
    "to_bayesian_",
]
