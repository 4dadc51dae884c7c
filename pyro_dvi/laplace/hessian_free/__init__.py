# SPDX-License-Identifier: Apache-2.0
"""Hessian-free Laplace: variances from second fits of an energy that is tilted by the prediction.

A mode chooses the tilting functions and computes variances from the fits; a solver sets their strength and runs the
fits.
To add a mode, subclass ``Mode``. To add a solver, subclass ``FineTuning`` with an optimizer, or ``Solver``.
"""

from pyro_dvi.laplace.hessian_free.second_fits import AbsoluteSum, Pointwise, Sum
from pyro_dvi.laplace.hessian_free.solvers import SGD, Adam, NewtonCG
from pyro_dvi.laplace.hessian_free.training_modes import InSample, LabelShift

__all__ = ["SGD", "AbsoluteSum", "Adam", "InSample", "LabelShift", "NewtonCG", "Pointwise", "Sum"]
