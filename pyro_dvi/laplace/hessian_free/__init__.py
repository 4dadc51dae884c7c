# SPDX-License-Identifier: Apache-2.0
"""Hessian-free Laplace: variances from second fits of an energy that is tilted by the prediction.

A mode chooses the functions that tilt, and reads variances off the fits; a solver sets their strength, and makes them.
Adding a mode: subclass ``Mode``. Adding a solver: subclass ``FineTuning`` with an optimizer, or ``Solver``.
"""

from pyro_dvi.laplace.hessian_free.second_fits import AbsoluteSum, Pointwise, Sum
from pyro_dvi.laplace.hessian_free.solvers import SGD, Adam, NewtonCG
from pyro_dvi.laplace.hessian_free.training_modes import InSample, LabelShift

__all__ = [
    "SGD",
    "AbsoluteSum",
    "Adam",
    "InSample",
    "LabelShift",
    "NewtonCG",
    "Pointwise",
    "Sum",
]
