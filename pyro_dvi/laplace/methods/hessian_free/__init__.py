# SPDX-License-Identifier: Apache-2.0
"""Hessian-free Laplace: variances from second fits of an energy that is tilted by the prediction.

A mode says which function tilts, a solver finds the minima, ``TwoFits`` sets the step between them. Adding a mode:
subclass ``Mode``, or ``PretrainedMode`` where one pair of fits serves all queries.
"""

from pyro_dvi.laplace.methods.hessian_free.method import HessianFree
from pyro_dvi.laplace.methods.hessian_free.modes import AbsoluteSum, Mode, Pointwise, PretrainedMode, Sum
from pyro_dvi.laplace.methods.hessian_free.solvers import LBFGS, Adam, NewtonCG, Solver
from pyro_dvi.laplace.methods.hessian_free.training_modes import InSample, LabelShift

__all__ = [
    "LBFGS",
    "AbsoluteSum",
    "Adam",
    "HessianFree",
    "InSample",
    "LabelShift",
    "Mode",
    "NewtonCG",
    "Pointwise",
    "PretrainedMode",
    "Solver",
    "Sum",
]
