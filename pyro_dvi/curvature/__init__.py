# SPDX-License-Identifier: Apache-2.0
"""Curvatures of the log-likelihood. This package depends on torch but not on Pyro."""

from pyro_dvi.curvature.fisher import EmpiricalFisher, Fisher, GGNDiagonal, MinibatchGradient
from pyro_dvi.curvature.hessian import HessianDiagonal
from pyro_dvi.curvature.linearisation import Curvature, Linearisation

__all__ = [
    "Curvature",
    "EmpiricalFisher",
    "Fisher",
    "GGNDiagonal",
    "HessianDiagonal",
    "Linearisation",
    "MinibatchGradient",
]
