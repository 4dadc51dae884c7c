# SPDX-License-Identifier: Apache-2.0
"""Curvatures of the log-likelihood. This package depends on torch but not on Pyro."""

from pyro_dvi.curvature.diagonals import (
    EmpiricalFisher,
    Fisher,
    GGNDiagonal,
    HessianDiagonal,
    MinibatchGradient,
)
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
