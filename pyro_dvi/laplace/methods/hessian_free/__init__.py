# SPDX-License-Identifier: Apache-2.0
"""Hessian-free Laplace: variances from second fits of an energy that is tilted by the prediction.

A mode says which functions tilt, and reads variances off the fits; a solver sets their strength, and makes them. Adding
a mode: subclass ``Mode``, or ``PretrainedMode`` where one pair of fits serves all queries. Adding a solver: subclass
``FineTuning`` with an optimizer, or ``Solver``.
"""

from pyro_dvi.laplace.methods.hessian_free.fine_tuning import (
    LBFGS,
    SGD,
    Adam,
    AsPrinted,
    FineTuning,
    FixedStrength,
)
from pyro_dvi.laplace.methods.hessian_free.method import HessianFree
from pyro_dvi.laplace.methods.hessian_free.modes import AbsoluteSum, Mode, Pointwise, PretrainedMode, Sum
from pyro_dvi.laplace.methods.hessian_free.newton_cg import NewtonCG
from pyro_dvi.laplace.methods.hessian_free.solvers import Solver
from pyro_dvi.laplace.methods.hessian_free.training_modes import InSample, LabelShift

__all__ = [
    "LBFGS",
    "SGD",
    "AbsoluteSum",
    "Adam",
    "AsPrinted",
    "FineTuning",
    "FixedStrength",
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
