# SPDX-License-Identifier: Apache-2.0
"""The table of methods, and how they are compared."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.laplace import (
    ConjugateGradient,
    Dense,
    Diagonal,
    Functional,
    Hessian,
    KroneckerFactored,
    LaplaceGuide,
    Method,
    PosteriorSamples,
    TopEigen,
)
from pyro_dvi.laplace.energy.query import Query

DRAWS = 1000


@dataclass
class Case:
    """A method and what it can do.

    Attributes:
        exact: its covariance is that of the dense matrix.
        relative_error: standard error of a variance, where it is random.
        unsupported: operations that it refuses.
    """

    method: Method
    exact: bool = True
    relative_error: float = 0.0
    unsupported: tuple[str, ...] = ()


CASES = {
    "dense": Case(Dense()),
    "cg": Case(
        ConjugateGradient(tolerance=1e-9), unsupported=("draw", "marginal_variance", "log_determinant")
    ),
    "functional": Case(Functional()),
    "top eigenvectors": Case(TopEigen(1000)),
    "samples": Case(
        PosteriorSamples(DRAWS),
        relative_error=(2 / DRAWS) ** 0.5,
        unsupported=("log_determinant", "solve"),
    ),
    "diagonal": Case(Diagonal(), exact=False),
    "kronecker": Case(KroneckerFactored(), exact=False),
}
HESSIAN = {
    "dense": Dense(Hessian()),
    "cg": ConjugateGradient(Hessian(), tolerance=1e-9),
    "top eigenvectors": TopEigen(1000, Hessian()),
}


def assert_within(found: Tensor, expected: Tensor, case: Case) -> None:
    """Equal, or equal within 5 standard errors: the failure rate is below 1e-6 for each entry."""
    if case.relative_error == 0:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
        return
    spread = torch.diagonal(expected, dim1=-2, dim2=-1).clamp_min(1e-12).sqrt()
    scale = spread.unsqueeze(-1) * spread.unsqueeze(-2)
    assert float(((found - expected).abs() / scale).max()) < 5 * case.relative_error


def fit(guide: LaplaceGuide, batches: list, method: Method, **options: Any) -> Any:
    return guide.fit(batches, method, unconverged="accept", **options)


def query_of(guide: LaplaceGuide, model: Callable, *inputs: Tensor) -> Query:
    locs = guide.unconstrained_mode()
    return Query(model, inputs, locs, guide.energy([inputs]).layout)
