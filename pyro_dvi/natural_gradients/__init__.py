# SPDX-License-Identifier: Apache-2.0
"""Natural gradients: VOGN, its deterministic version OGN, and IVON."""

from pyro_dvi.natural_gradients.elbo import NaturalGradientELBO
from pyro_dvi.natural_gradients.guide import NaturalGradientGuide
from pyro_dvi.natural_gradients.ivon import IVONOptimizer
from pyro_dvi.natural_gradients.optimizer import NaturalGradientOptimizer
from pyro_dvi.natural_gradients.pyro_optimizers import IVON, OGN, VOGN, NaturalGradientOptim
from pyro_dvi.natural_gradients.vogn import AsPrinted, Consistent, OGNOptimizer, VOGNOptimizer

__all__ = [
    "AsPrinted",
    "Consistent",
    "IVON",
    "IVONOptimizer",
    "NaturalGradientELBO",
    "NaturalGradientGuide",
    "NaturalGradientOptim",
    "NaturalGradientOptimizer",
    "OGN",
    "OGNOptimizer",
    "VOGN",
    "VOGNOptimizer",
]
