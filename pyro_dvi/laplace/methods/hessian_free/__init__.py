# SPDX-License-Identifier: Apache-2.0
"""Hessian-free Laplace: variances from second fits of an energy that is tilted by the prediction.

A mode says which function tilts (one mode a file), a solver finds the minima, :class:`TwoFits` sets the step between
them. Adding a mode: subclass :class:`Mode`, or :class:`PretrainedMode` where one pair of fits serves all queries.
"""

from pyro_dvi.laplace.methods.hessian_free.method import HessianFree, HessianFreePosterior
from pyro_dvi.laplace.methods.hessian_free.modes import AbsoluteSum, Mode, Pointwise, PretrainedMode, Sum
from pyro_dvi.laplace.methods.hessian_free.solvers import LBFGS, Adam, NewtonCG, Solver, Tilt, TiltedEnergy
from pyro_dvi.laplace.methods.hessian_free.training_modes import InSample, LabelShift
from pyro_dvi.laplace.methods.hessian_free.two_fits import Fits, TwoFits

__all__ = [
    "AbsoluteSum",
    "Adam",
    "Fits",
    "HessianFree",
    "HessianFreePosterior",
    "InSample",
    "LBFGS",
    "LabelShift",
    "Mode",
    "NewtonCG",
    "Pointwise",
    "PretrainedMode",
    "Solver",
    "Sum",
    "Tilt",
    "TiltedEnergy",
    "TwoFits",
]
