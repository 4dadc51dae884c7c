# SPDX-License-Identifier: Apache-2.0
"""Curvatures of the log-likelihood: torch only, nothing of Pyro."""

from pyro_dvi.curvature.base import Curvature
from pyro_dvi.curvature.example_squares import EmpiricalFisher, GGNDiagonal
from pyro_dvi.curvature.fisher import Fisher, MinibatchGradient
from pyro_dvi.curvature.hessian import HessianDiagonal
from pyro_dvi.curvature.likelihood import Linearisation, ObservedSite

__all__ = [
    "Curvature",
    "EmpiricalFisher",
    "Fisher",
    "GGNDiagonal",
    "HessianDiagonal",
    "Linearisation",
    "MinibatchGradient",
    "ObservedSite",
]
