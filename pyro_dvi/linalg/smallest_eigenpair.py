# SPDX-License-Identifier: Apache-2.0
"""The smallest eigenvalue of a symmetric matrix: is it positive definite?"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dvi.core.arguments import check_count
from pyro_dvi.linalg.lanczos import LanczosProcess
from pyro_dvi.linalg.operator import Operator, gaussian_rows


@dataclass(frozen=True)
class Eigenpair:
    r"""An eigenvalue and its vector.

    Attributes:
        value: :math:`\lambda`, the Rayleigh quotient of the vector: never below the smallest eigenvalue, so that a
            negative one proves that the matrix is not positive definite.
        vector: v, ``[D]``, of norm one.
        residual: :math:`|A v - \lambda v|`; some eigenvalue lies within that distance.
        norm: the largest ``|eigenvalue|``, estimated from below on the same space.
        converged: whether the residual is within the tolerance, or as small as rounding allows.
        applications: vectors that the operator was applied to.
    """

    value: float
    vector: Tensor
    residual: float
    norm: float
    converged: bool
    applications: int

    @property
    def resolution(self) -> float:
        """How near to zero an eigenvalue of this matrix can be and still be told from it in this dtype."""
        return 8 * torch.finfo(self.vector.dtype).eps * self.norm


def smallest_eigenpair(
    operator: Operator,
    dim: int,
    *,
    steps: int = 200,
    tolerance: float = 1e-2,
    generator: torch.Generator | None = None,
    like: Tensor | None = None,
) -> Eigenpair:
    r"""Return the algebraically smallest eigenvalue by the Lanczos recursion from a random start.

    Status: the value is an upper bound of the smallest eigenvalue, and approaches it with the steps: after m of them
    the error is about :math:`(\lambda_{\max} - \lambda_{\min})\,(\log D / m)^2` in the worst case and much less where
    the eigenvalue stands apart. The sign is the same for :math:`M^{-1/2} A M^{-1/2}`, which is often the easier
    matrix.

    Args:
        operator: A, symmetric.
        dim: D.
        steps: applications at most, one vector each; ``steps * D`` numbers are held.
        tolerance: bound on the residual relative to ``|value|``: below one, the sign of that eigenvalue is settled.
        generator: of the start; a fixed seed by default.
        like: tensor whose dtype and device are used; the default dtype on the CPU otherwise.

    Raises:
        ArgumentError: a count is not positive.

    Source: Kuczynski & Wozniakowski (1992) for random starts.

    Example:
        >>> saddle = torch.tensor([3.0, 2.0, -0.5])
        >>> round(smallest_eigenpair(lambda v: v * saddle, 3).value, 4)
        -0.5
    """
    check_count("dim", dim)
    check_count("steps", steps)
    like = torch.empty(0) if like is None else like
    process = LanczosProcess(operator, gaussian_rows(1, dim, like, generator), steps)
    rounding, next_look = 8 * torch.finfo(like.dtype).eps, 1
    while True:
        process.advance()
        if process.steps < next_look and not process.finished:
            continue
        next_look = process.steps + 1 + process.steps // 10  # the small decomposition should cost little
        reduced = process.tridiagonal()
        values, vectors = torch.linalg.eigh(reduced.dense())
        value, norm = float(values[0]), float(values.abs().max())
        residual = reduced.remainder * abs(float(vectors[-1, 0]))
        converged = residual <= max(tolerance * abs(value), rounding * norm)
        if converged or process.finished:
            break
    vector = vectors[:, 0].to(like) @ reduced.basis
    return Eigenpair(value, vector / vector.norm(), residual, norm, converged, process.applications)
