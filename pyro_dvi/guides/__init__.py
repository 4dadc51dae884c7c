# SPDX-License-Identifier: Apache-2.0
"""Guides: posterior families for ``pyro.infer.SVI``."""

from pyro_dvi.guides.mean_field import MeanFieldGuide
from pyro_dvi.guides.scales import PerSite, PerWeight, ScaleFamily, SGDStepSize

__all__ = ["MeanFieldGuide", "PerSite", "PerWeight", "SGDStepSize", "ScaleFamily"]
