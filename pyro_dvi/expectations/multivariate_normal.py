# SPDX-License-Identifier: Apache-2.0
"""The multivariate normal likelihood."""

from typing import Any

import torch
from torch import Tensor
from torch import distributions as td

from pyro_dvi.expectations.rules import expectation_rule
from pyro_dvi.moments import GaussianMoments

__all__ = ["multivariate_normal"]


@expectation_rule(td.MultivariateNormal)
def multivariate_normal(
    value: Tensor,
    loc: Any,
    covariance_matrix: Any = None,
    precision_matrix: Any = None,
    scale_tril: Any = None,
) -> Tensor:
    r"""Expected log density for an uncertain mean.

    .. math:: \log\mathcal N(y; \bar\mu, \Sigma) - \tfrac12\operatorname{tr}\bigl(\Sigma^{-1}\operatorname{diag}v\bigr).

    Status: exact for a certain covariance; an uncertain one is averaged numerically.

    Args:
        value: ``[*batch, D]``.
        loc: ``[*batch, D]``.
        covariance_matrix: ``[*batch, D, D]``; or one of the next two.
        precision_matrix: likewise.
        scale_tril: likewise.
    """
    shapes = {
        "covariance_matrix": covariance_matrix,
        "precision_matrix": precision_matrix,
        "scale_tril": scale_tril,
    }
    given = {name: matrix for name, matrix in shapes.items() if matrix is not None}
    if any(isinstance(matrix, GaussianMoments) for matrix in given.values()):
        return NotImplemented
    at_mean = td.MultivariateNormal(loc.loc, **given)
    precision = torch.diagonal(at_mean.precision_matrix, dim1=-2, dim2=-1)
    return at_mean.log_prob(value) - 0.5 * (precision * loc.variance).sum(-1)
