# SPDX-License-Identifier: Apache-2.0
"""Likelihoods with a location (Normal and related families, Laplace) or a rate (Poisson)."""

import math
from typing import Any

import torch
from torch import Tensor, distributions as td

from pyro_dvi.expectations.expectation import expectation_rule
from pyro_dvi.expectations.points import are_dependent, log_and_inverse_power
from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.shared_noise import covariance_between, covariance_of, has_covariances
from pyro_dvi.moments.value import floored, loc_of, variance_of

_HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


@expectation_rule(td.Normal, covariances=True)
def normal(value: Tensor, loc: Any, scale: Any) -> Tensor:
    r"""Expected log density of a Normal.

    For a deterministic scale s, it is

    .. math:: -\tfrac12\log 2\pi s^2 - \frac{v_\mu + (y - \bar\mu)^2}{2s^2},

    and for a scale :math:`e^h`, that is, a log-variance :math:`c = 2h` with :math:`v_c = 4v_h`, it is

    .. math:: -\tfrac12\bigl(\log 2\pi + \bar c + e^{-\bar c + v_c/2}(v_\mu + (y - \bar\mu)^2)\bigr).

    Status: exact for a Gaussian ``loc`` and a scale that is deterministic or the exponential of a Gaussian. Other
    scales use quadrature (:func:`~pyro_dvi.expectations.points.log_and_inverse_power`). If ``loc`` and h are outputs of
    one layer whose weights have covariances between outputs, :math:`y - \bar\mu` becomes
    :math:`y - \bar\mu + 2\mathrm{Cov}[\mu, h]`.

    Source: Schmitt & Roth (2021), Eq. 15. The term :math:`e^{-c + v_c}` printed in the paper is an error: the mean of a
    log-normal variable has half the variance in its exponent.

    Example:
        >>> normal(
        ...     torch.tensor(1.0),
        ...     GaussianMoments(torch.tensor(0.0), torch.tensor(1.0)),
        ...     torch.tensor(1.0),
        ... )
        tensor(-1.9189)
    """
    mean_log, precision = log_and_inverse_power(td.Normal, "scale", scale, 2)
    error = value - loc_of(loc)
    if are_dependent(td.Normal, {"loc": loc, "scale": scale}):
        if loc.link is not None or scale.link is None or scale.link.name != "exp" or loc.dim() != scale.dim():
            return NotImplemented
        error = error + 2 * covariance_between(loc, scale.link.inner)
    squares = error.square()
    spread = variance_of(loc)
    if spread is not None:
        squares = squares + spread
    return -0.5 * squares * precision - mean_log - _HALF_LOG_2PI


@expectation_rule(td.LogNormal)
def log_normal(value: Tensor, loc: Any, scale: Any) -> Tensor:
    r"""Expected log density of a LogNormal: the result of :func:`normal` at :math:`\log y`, minus :math:`\log y`.

    Status: like :func:`normal`.
    """
    logarithm = value.log()
    return normal(logarithm, loc, scale) - logarithm


@expectation_rule(td.MultivariateNormal, covariances=True)
def multivariate_normal(
    value: Tensor,
    loc: Any,
    covariance_matrix: Any = None,
    precision_matrix: Any = None,
    scale_tril: Any = None,
) -> Tensor:
    r"""Expected log density of a MultivariateNormal with uncertain mean.

    .. math:: \log\mathcal N(y; \bar\mu, \Sigma) - \tfrac12\operatorname{tr}\bigl(\Sigma^{-1}\operatorname{diag}v\bigr).

    Status: exact for a deterministic covariance; an uncertain covariance is averaged numerically.

    Args:
        value: ``[*batch, D]``.
        loc: ``[*batch, D]``.
        covariance_matrix: ``[*batch, D, D]``; alternatively, pass one of the next two.
        precision_matrix: likewise.
        scale_tril: likewise.
    """
    noise = covariance_matrix, precision_matrix, scale_tril
    if any(isinstance(matrix, GaussianMoments) for matrix in noise):
        return NotImplemented
    at_mean = td.MultivariateNormal(loc.loc, *noise)
    if has_covariances(loc):
        return at_mean.log_prob(value) - 0.5 * (at_mean.precision_matrix * covariance_of(loc)).sum((-2, -1))
    precision = torch.diagonal(at_mean.precision_matrix, dim1=-2, dim2=-1)
    return at_mean.log_prob(value) - 0.5 * (precision * loc.variance).sum(-1)


@expectation_rule(td.Laplace)
def laplace(value: Tensor, loc: Any, scale: Any) -> Tensor:
    r"""Expected log density of a Laplace, :math:`-\log 2 - \mathrm E[\log b] - \mathrm E|y - f|\,\mathrm E[1/b]`.

    With :math:`d = y - \bar f`,

    .. math::
        \mathrm E|y - f| = d\,\mathrm{erf}\frac{d}{\sqrt{2v}} + \sqrt{\frac{2v}{\pi}}\,e^{-d^2/2v}.

    Status: exact for a Gaussian ``loc`` and a scale that is deterministic or the exponential of a Gaussian. Other
    scales use quadrature (:func:`~pyro_dvi.expectations.points.log_and_inverse_power`). The correlation of ``loc`` and
    scale is dropped. If ``loc`` is a nonlinear function of a Gaussian, the expectation is computed numerically.
    """
    if isinstance(loc, GaussianMoments) and loc.link is not None:
        return NotImplemented
    mean_log, inverse = log_and_inverse_power(td.Laplace, "scale", scale, 1)
    if isinstance(loc, GaussianMoments):
        distance = mean_distance(value - loc.loc, floored(loc.variance).sqrt())
    else:
        distance = (value - loc).abs()
    return -distance * inverse - mean_log - math.log(2)


def mean_distance(distance: Tensor, scale: Tensor) -> Tensor:
    """Return the mean of ``abs(x)`` for Gaussian x with mean ``distance`` and standard deviation ``scale``."""
    z = distance / scale.clamp_min(torch.finfo(scale.dtype).tiny)
    density = math.sqrt(2 / math.pi) * torch.exp(-0.5 * z.square())
    return scale * density + distance * torch.erf(z * math.sqrt(0.5))


@expectation_rule(td.Poisson)
def poisson(value: Tensor, rate: Any) -> Tensor:
    r"""Expected log probability of a count, :math:`y\,\mathrm E[\log r] - \mathrm E[r] - \log y!`.

    Status: exact if the rate is the exponential of a Gaussian; other functions use Gauss-Hermite quadrature with 32
    nodes.

    Example:
        >>> f = GaussianMoments(torch.zeros(1), torch.ones(1))
        >>> from pyro_dvi.moments.value import Link
        >>> rate = GaussianMoments(
        ...     f.loc.exp(), f.variance, Link(f, torch.exp, "exp")
        ... )  # as from a rule for exp
        >>> poisson(torch.zeros(1), rate)
        tensor([-1.6487])
    """
    logarithm, mean = log_and_inverse_power(td.Poisson, "rate", rate, -1)
    return value * logarithm - mean - torch.lgamma(value + 1)
