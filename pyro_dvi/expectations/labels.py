# SPDX-License-Identifier: Apache-2.0
"""Likelihoods of labels: Bernoulli, with one logit, and distributions over several classes."""

from typing import Any

import torch
from torch import Tensor, distributions as td

from pyro_dvi.expectations.expectation import expectation_rule
from pyro_dvi.expectations.logits import LogitEstimator
from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.activations import sigmoid, softplus

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
