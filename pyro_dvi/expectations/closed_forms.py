# SPDX-License-Identifier: Apache-2.0
"""Likelihoods with a location (Normal and related families, Laplace), a rate (Poisson), or labels."""

import math
from typing import Any

import torch
from torch import Tensor, distributions as td

from pyro_dvi.expectations.expectation import expectation_rule
from pyro_dvi.expectations.logits import LogitEstimator
from pyro_dvi.expectations.points import are_dependent, log_and_inverse_power
from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.activations import sigmoid, softplus
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


# One logit ----------------------------------------------------------------------------------------------------


def expected_softplus(h: GaussianMoments) -> Tensor:
    """Mean of ``log(1 + exp(h))`` for Gaussian h, computed in float64.

    Status: exact to 1e-9 for every mean and variance.

    Example:
        >>> expected_softplus(GaussianMoments(torch.zeros(1), torch.zeros(1)))
        tensor([0.6931])
    """
    return softplus(GaussianMoments(h.loc.double(), h.variance.double())).loc.to(h.dtype)


def logit_of_expected_sigmoid(h: GaussianMoments) -> Tensor:
    r"""Logit of the mean of ``sigmoid(h)`` for Gaussian h, accurate in both tails.

    For a mean :math:`\mu` below :math:`-v/2`, the identity :math:`\sigma(h) = e^h\sigma(-h)` replaces the small average
    by one that is not small:

    .. math:: \mathrm E_{\mathcal N(\mu, v)}[\sigma(h)] = e^{\mu + v/2}\,\mathrm E_{\mathcal N(\mu + v, v)}[\sigma(-h)].

    Status: the logarithms of both probabilities are exact to 1e-6 (float64), up to variances of several hundred.

    Example:
        >>> logit_of_expected_sigmoid(GaussianMoments(torch.tensor([-40.0]), torch.ones(1)))
        tensor([-39.5000])
    """
    return _log_expected_sigmoid(h.loc, h.variance) - _log_expected_sigmoid(-h.loc, h.variance)


def _log_expected_sigmoid(mu: Tensor, variance: Tensor) -> Tensor:
    exponent = (mu + variance / 2).clamp_max(0)
    shifted = torch.where(exponent < 0, -(mu + variance), mu)
    average = sigmoid(GaussianMoments(shifted.double(), variance.double())).loc.to(mu.dtype)
    return exponent + average.clamp_min(torch.finfo(mu.dtype).tiny).log()


_SIGMOIDS = ("sigmoid", "special_expit", "expit")


def gaussian_logit(logits: Any, probs: Any) -> GaussianMoments | None:
    """Return the Gaussian logit; None if the parameter is neither Gaussian nor the sigmoid of a Gaussian."""
    if isinstance(logits, GaussianMoments):
        return logits if logits.link is None else None
    if isinstance(probs, GaussianMoments) and probs.link is not None and probs.link.name in _SIGMOIDS:
        return probs.link.inner
    return None


@expectation_rule(td.Bernoulli)
def bernoulli(value: Tensor, probs: Any = None, logits: Any = None) -> Tensor:
    r"""Expected log probability of :math:`y \in \{0, 1\}`, :math:`y\bar f - \mathrm E[\log(1 + e^f)]`.

    Status: exact to 1e-9 for Gaussian logits of any variance, and for ``probs`` that are the sigmoid of such logits.

    Example:
        >>> bernoulli(torch.ones(1), logits=GaussianMoments(torch.zeros(1), torch.ones(1)))
        tensor([-0.8061])
    """
    f = gaussian_logit(logits, probs)
    return NotImplemented if f is None else value * f.loc - expected_softplus(f)


# Classes ------------------------------------------------------------------------------------------------------


def gaussian_logits(logits: Any = None, probs: Any = None) -> GaussianMoments | None:
    """Return Gaussian logits of a softmax over the last dimension; None for any other parameter."""
    given = probs if logits is None else logits
    if not isinstance(given, GaussianMoments):
        return None
    if given.link is None:
        return None if logits is None else given
    name = "softmax" if logits is None else "log_softmax"
    if given.link.name == name and _normalises_last_dimension(given, logarithm=logits is not None):
        return given.link.inner
    return None


def _normalises_last_dimension(parameter: GaussianMoments, logarithm: bool) -> bool:
    """Return True if the function normalises over the last dimension, where two equal inputs then give ½ each."""
    assert parameter.link is not None
    trial = parameter.link.function(torch.zeros((1,) * (parameter.dim() - 1) + (2,)))
    return bool(trial.flatten()[0] < (-0.5 if logarithm else 0.75))


@expectation_rule(td.Categorical, covariances=True)
def categorical(value: Tensor, estimator: LogitEstimator, probs: Any = None, logits: Any = None) -> Tensor:
    r"""Expected log probability of a class, :math:`\bar f_y - \mathrm E[\log\sum_c e^{f_c}]`.

    Status: the first term is exact, and the second is as accurate as the estimator. Logits (or ``probs`` that are a
    softmax of them) are treated as independent Gaussians unless they share the noise of a last layer; other functions
    of Gaussians are averaged numerically.

    Source: Schmitt & Roth (2021), Section 3.4, Eq. 16.
    """
    f = gaussian_logits(logits, probs)
    if f is None:
        return NotImplemented
    shape = torch.broadcast_shapes(f.loc.shape[:-1], value.shape)
    index = value.long().expand(shape).unsqueeze(-1)
    at_class = f.loc.expand(*shape, -1).gather(-1, index).squeeze(-1)
    return at_class - estimator.expected_logsumexp(f)


@expectation_rule(td.OneHotCategorical, td.Multinomial, covariances=True)
def multinomial(
    value: Tensor,
    estimator: LogitEstimator,
    total_count: Any = 1,
    probs: Any = None,
    logits: Any = None,
) -> Tensor:
    r"""Expected log probability of counts :math:`y_c` that sum to n.

    .. math:: \log n! - \sum_c\log y_c! + \sum_c y_c\bar f_c - n\,\mathrm E[\log\textstyle\sum_c e^{f_c}].

    A one-hot vector is a count of one. Status: like :func:`categorical`.
    """
    f = gaussian_logits(logits, probs)
    if f is None:
        return NotImplemented
    count = value.sum(-1)
    arrangements = torch.lgamma(count + 1) - torch.lgamma(value + 1).sum(-1)
    return arrangements + (value * f.loc).sum(-1) - count * estimator.expected_logsumexp(f)
