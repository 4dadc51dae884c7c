# SPDX-License-Identifier: Apache-2.0
"""Optimizers: one for all parameters, step sizes for posterior scales."""

from pyro_dvi.optim.joint import JointOptim, ScheduledJointOptim
from pyro_dvi.optim.learning_rates import (
    SCALE_PATTERN,
    LearningRates,
    learning_rates,
    parameter_groups,
    parameter_names,
)
from pyro_dvi.optim.torch_optimizers import SGD, Adam, AdamW

__all__ = [
    "SCALE_PATTERN",
    "SGD",
    "Adam",
    "AdamW",
    "JointOptim",
    "LearningRates",
    "ScheduledJointOptim",
    "learning_rates",
    "parameter_groups",
    "parameter_names",
]
