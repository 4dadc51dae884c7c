# SPDX-License-Identifier: Apache-2.0
"""Maps from uncertain parameters of a likelihood to a predictive distribution."""

from pyro_dvi.links.class_links import Probit, SobolSoftmax
from pyro_dvi.links.families import predictive_rule
from pyro_dvi.links.noise_links import GaussHermite, MomentMatched

__all__ = [
    "GaussHermite",
    "MomentMatched",
    "Probit",
    "SobolSoftmax",
    "predictive_rule",
]
