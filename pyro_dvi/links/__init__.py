# SPDX-License-Identifier: Apache-2.0
"""From uncertain parameters of a likelihood to a predictive distribution."""

from pyro_dvi.links.class_links import ClassLink, LaplaceBridge, Probit, SobolSoftmax
from pyro_dvi.links.families import predictive_distribution, predictive_rule
from pyro_dvi.links.noise_links import GaussHermite, MomentMatched, NoiseLink

__all__ = [
    "ClassLink",
    "GaussHermite",
    "LaplaceBridge",
    "MomentMatched",
    "NoiseLink",
    "Probit",
    "SobolSoftmax",
    "predictive_distribution",
    "predictive_rule",
]
