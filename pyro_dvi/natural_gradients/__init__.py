# SPDX-License-Identifier: Apache-2.0
"""Natural gradients: VOGN, its deterministic version OGN, IVON, and noisy K-FAC."""

from pyro_dvi.natural_gradients.estimates import Estimate
from pyro_dvi.natural_gradients.ivon import IVON, IVONOptimizer
from pyro_dvi.natural_gradients.kronecker_guide import KroneckerGuide, LayerFisher
from pyro_dvi.natural_gradients.natural_elbo import NaturalGradientELBO
from pyro_dvi.natural_gradients.noisy_kfac import NoisyKFAC, NoisyKFACOptimizer
from pyro_dvi.natural_gradients.precision_guide import NaturalGradientGuide
from pyro_dvi.natural_gradients.updates import (
    OGN,
    VOGN,
    AsPrinted,
    OGNOptimizer,
    VOGNOptimizer,
)

__all__ = [
    "AsPrinted",
    "Estimate",
    "IVON",
    "IVONOptimizer",
    "KroneckerGuide",
    "LayerFisher",
    "NaturalGradientELBO",
    "NaturalGradientGuide",
    "NoisyKFAC",
    "NoisyKFACOptimizer",
    "OGN",
    "OGNOptimizer",
    "VOGN",
    "VOGNOptimizer",
]
