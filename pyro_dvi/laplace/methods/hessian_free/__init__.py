# SPDX-License-Identifier: Apache-2.0
"""Hessian-free Laplace: variances from second fits of an energy that is tilted by the prediction.

A mode says which function tilts (one mode a file), a solver finds the minima, :class:`TwoFits` sets the step between
them. Adding a mode: subclass :class:`Mode`, or :class:`PretrainedMode` where one pair of fits serves all queries.
"""

from pyro_dvi.laplace.methods.hessian_free.absolute_sum import AbsoluteSum
from pyro_dvi.laplace.methods.hessian_free.adam import Adam
from pyro_dvi.laplace.methods.hessian_free.evaluation_sum import Sum
from pyro_dvi.laplace.methods.hessian_free.in_sample import InSample
from pyro_dvi.laplace.methods.hessian_free.label_shift import LabelShift
from pyro_dvi.laplace.methods.hessian_free.lbfgs import LBFGS
from pyro_dvi.laplace.methods.hessian_free.method import HessianFree, HessianFreePosterior
from pyro_dvi.laplace.methods.hessian_free.mode import Mode, PretrainedMode
from pyro_dvi.laplace.methods.hessian_free.newton_cg import NewtonCG
from pyro_dvi.laplace.methods.hessian_free.pointwise import Pointwise
from pyro_dvi.laplace.methods.hessian_free.solver import Solver
from pyro_dvi.laplace.methods.hessian_free.tilted_energy import Tilt, TiltedEnergy
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
