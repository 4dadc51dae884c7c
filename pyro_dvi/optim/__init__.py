# SPDX-License-Identifier: Apache-2.0
"""Optimizers that update all parameters together, and learning rates for posterior scales."""

from pyro_dvi.optim.joint_optim import SGD, Adam, JointOptim
from pyro_dvi.optim.learning_rates import learning_rates, parameter_groups

__all__ = ["SGD", "Adam", "JointOptim", "learning_rates", "parameter_groups"]
