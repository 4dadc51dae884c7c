# SPDX-License-Identifier: Apache-2.0
"""From uncertain parameters of a likelihood to a predictive distribution."""

from pyro_dvi.links.classes import ClassLink, LaplaceBridge, Probit, SobolSoftmax
from pyro_dvi.links.noise import GaussHermite, MomentMatched, NoiseLink
from pyro_dvi.links.predictive import predictive_distribution, predictive_rule

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
