# SPDX-License-Identifier: Apache-2.0
"""Hessian-free Laplace: variances from second fits, in which a multiple of the prediction is added to the energy.

A mode chooses the functions that are added (the tilts) and computes variances from the fits. A solver sets the strength
of the tilts and runs the fits. To add a mode, subclass ``Mode``. To add a solver, subclass ``FineTuning`` with an
optimizer, or ``Solver``.
"""

from pyro_dvi.laplace.hessian_free.second_fits import AbsoluteSum, Pointwise, Sum
from pyro_dvi.laplace.hessian_free.solvers import SGD, Adam, NewtonCG
from pyro_dvi.laplace.hessian_free.training_modes import InSample, LabelShift

__all__ = ["SGD", "AbsoluteSum", "Adam", "InSample", "LabelShift", "NewtonCG", "Pointwise", "Sum"]
