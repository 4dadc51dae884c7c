# SPDX-License-Identifier: Apache-2.0
"""Guides: posterior families for ``pyro.infer.SVI``."""

from pyro_dvi.guides.base import FactorisedGuide
from pyro_dvi.guides.factors import Deterministic, Factor, MeanField
from pyro_dvi.guides.last_layer import AllOutputs, LastLayerGuide, LayerCovariance, LowRank, PerOutput
from pyro_dvi.guides.mean_field import MeanFieldGuide
from pyro_dvi.guides.multiplicative_noise import MultiplicativeNoiseGuide
from pyro_dvi.guides.natural_gradient import NaturalGradientGuide
from pyro_dvi.guides.scales import PerSite, PerWeight, ScaleFamily, SGDStepSize

__all__ = [
    "AllOutputs",
    "Deterministic",
    "Factor",
    "FactorisedGuide",
    "LastLayerGuide",
    "LayerCovariance",
    "LowRank",
    "MeanField",
    "MeanFieldGuide",
    "MultiplicativeNoiseGuide",
    "NaturalGradientGuide",
    "PerOutput",
    "PerSite",
    "PerWeight",
    "SGDStepSize",
    "ScaleFamily",
]
