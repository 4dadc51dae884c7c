# SPDX-License-Identifier: Apache-2.0
"""Optimizers: one for all parameters, step sizes for posterior scales, and updates along the natural gradient."""

from pyro_dvi.optim.ivon import IVONOptimizer
from pyro_dvi.optim.joint import JointOptim
from pyro_dvi.optim.learning_rates import (
    SCALE_PATTERN,
    LearningRates,
    learning_rates,
    parameter_groups,
    parameter_names,
)
from pyro_dvi.optim.natural_gradient import NaturalGradientOptimizer
from pyro_dvi.optim.pyro_optimizers import IVON, OGN, VOGN, NaturalGradientOptim
from pyro_dvi.optim.scheduled import ScheduledJointOptim
from pyro_dvi.optim.torch_optimizers import SGD, Adam, AdamW
from pyro_dvi.optim.vogn import AsPrinted, Consistent, OGNOptimizer, VOGNOptimizer

__all__ = [
    "IVON",
    "OGN",
    "SCALE_PATTERN",
    "SGD",
    "VOGN",
    "Adam",
    "AdamW",
    "AsPrinted",
    "Consistent",
    "IVONOptimizer",
    "JointOptim",
    "LearningRates",
    "NaturalGradientOptim",
    "NaturalGradientOptimizer",
    "OGNOptimizer",
    "ScheduledJointOptim",
    "VOGNOptimizer",
    "learning_rates",
    "parameter_groups",
    "parameter_names",
]
