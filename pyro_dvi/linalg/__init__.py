# SPDX-License-Identifier: Apache-2.0
"""Linear algebra and minimisation by products with a matrix that is never formed: torch only, nothing of Pyro."""

from pyro_dvi.linalg.conjugate_gradients import Preconditioner, Solution, conjugate_gradients
from pyro_dvi.linalg.operator import Operator

__all__ = [
    "Operator",
    "Preconditioner",
    "Solution",
    "conjugate_gradients",
]
