# SPDX-License-Identifier: Apache-2.0
"""Which displacements of the latents change U alike."""

import warnings

import torch

from pyro_dvi.core.undisturbed import widest
from pyro_dvi.errors import DviWarning, ModelError, NotPositiveDefiniteError, UnsupportedError
from pyro_dvi.laplace.energy.energy import LocalEnergy
from pyro_dvi.laplace.energy.precision import GGN, prior_diagonal
from pyro_dvi.laplace.methods.diagonal import likelihood_diagonal
from pyro_dvi.laplace.methods.kronecker import KroneckerFactored
from pyro_dvi.linalg import CholeskyMetric, DiagonalMetric, Metric

_DENSE = 2000  # latents up to which a matrix is factorised again every some thirty gradients


def metric_at(local: LocalEnergy) -> Metric:
    """Return the Gauss-Newton matrix of U, or its Kronecker factors: positive definite wherever the point is.

    K backward passes for K outputs. The matrix is taken where its size allows and its rows are cheap, the diagonal
    where the latents have no factors, and the prior's where the model has no such matrix (``pyro.factor``).

    Args:
        local: U around a point.
    """
    try:
        if len(local.point) <= _DENSE and (matrix := GGN().from_examples(local)) is not None:
            factor, failed = torch.linalg.cholesky_ex(matrix.to(widest(matrix.device)))
            if not bool(failed):
                return CholeskyMetric(factor.to(local.point))
        if (factors := _by_factors(local)) is not None:
            return factors
        diagonal = prior_diagonal(local, "polish") + likelihood_diagonal(local)
        # One where a prior bends down, or is flat and no data are near.
        return DiagonalMetric(torch.where(diagonal > 0, diagonal, 1.0))
    except (ModelError, UnsupportedError):
        return DiagonalMetric(local.prior_scale.square().reciprocal())


def _by_factors(local: LocalEnergy) -> Metric | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DviWarning)  # sites that keep a diagonal are no matter here
            return KroneckerFactored().fit(local)
    except (NotPositiveDefiniteError, UnsupportedError):
        return None
