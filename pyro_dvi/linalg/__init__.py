# SPDX-License-Identifier: Apache-2.0
"""Linear algebra and minimisation by products with a matrix that is never formed: torch only, nothing of Pyro."""

from pyro_dvi.linalg.block_conjugate_gradients import block_conjugate_gradients
from pyro_dvi.linalg.conjugate_gradients import Preconditioner, Solution, conjugate_gradients
from pyro_dvi.linalg.lanczos import Tridiagonal, lanczos
from pyro_dvi.linalg.log_determinant import SpectralQuadrature, TraceEstimate, trace_of_function
from pyro_dvi.linalg.metric import CholeskyMetric, DiagonalMetric, InMetric, Metric, SmoothFunction
from pyro_dvi.linalg.newton import Minimum, minimise_newton
from pyro_dvi.linalg.operator import Operator
from pyro_dvi.linalg.quasi_newton import Descent, descend
from pyro_dvi.linalg.smallest_eigenpair import Eigenpair, smallest_eigenpair
from pyro_dvi.linalg.top_eigenpairs import Eigenpairs, top_eigenpairs

__all__ = [
    "CholeskyMetric",
    "Descent",
    "DiagonalMetric",
    "Eigenpair",
    "Eigenpairs",
    "InMetric",
    "Metric",
    "Minimum",
    "Operator",
    "Preconditioner",
    "SmoothFunction",
    "Solution",
    "SpectralQuadrature",
    "TraceEstimate",
    "Tridiagonal",
    "block_conjugate_gradients",
    "conjugate_gradients",
    "descend",
    "lanczos",
    "minimise_newton",
    "smallest_eigenpair",
    "top_eigenpairs",
    "trace_of_function",
]
