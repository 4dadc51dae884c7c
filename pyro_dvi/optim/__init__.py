# SPDX-License-Identifier: Apache-2.0
"""Optimizers: step sizes for posterior scales."""

from pyro_dvi.optim.learning_rates import (
    SCALE_PATTERN,
    LearningRates,
    learning_rates,
    parameter_groups,
    parameter_names,
)

__all__ = ["SCALE_PATTERN", "LearningRates", "learning_rates", "parameter_groups", "parameter_names"]
