# SPDX-License-Identifier: Apache-2.0
"""Guides: posterior families for ``pyro.infer.SVI``."""

from pyro_dvi.guides.base import FactorisedGuide
from pyro_dvi.guides.factors import Deterministic, MeanField, PerSite, PerWeight, SGDStepSize
from pyro_dvi.guides.mean_field import MeanFieldGuide

__all__ = [
    "Deterministic",
    "FactorisedGuide",
    "MeanField",
    "MeanFieldGuide",
    "PerSite",
    "PerWeight",
    "SGDStepSize",
]
