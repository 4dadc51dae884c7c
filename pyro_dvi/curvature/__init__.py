# SPDX-License-Identifier: Apache-2.0
"""Curvatures of the log-likelihood: torch only, nothing of Pyro."""

from pyro_dvi.curvature.base import Curvature
from pyro_dvi.curvature.empirical_fisher import EmpiricalFisher
from pyro_dvi.curvature.fisher import Fisher
from pyro_dvi.curvature.ggn import GGN
from pyro_dvi.curvature.hessian import HessianDiagonal
from pyro_dvi.curvature.likelihood import Linearisation, ObservedSite
from pyro_dvi.curvature.minibatch_gradient import MinibatchGradient

__all__ = [
    "Curvature",
    "EmpiricalFisher",
    "Fisher",
    "GGN",
    "HessianDiagonal",
    "Linearisation",
    "MinibatchGradient",
    "ObservedSite",
]
