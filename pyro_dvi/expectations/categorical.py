# SPDX-License-Identifier: Apache-2.0
"""Likelihoods of classes: categorical, one-hot and multinomial."""

from typing import Any

import torch
from torch import Tensor
from torch import distributions as td

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.expectations.logits import LogitEstimator
from pyro_dvi.expectations.rules import expectation_rule
from pyro_dvi.moments import GaussianMoments


def gaussian_logits(logits: Any = None, probs: Any = None) -> GaussianMoments | None:
    """Return Gaussian logits of a softmax over the last dimension, None where the parameter is something else."""
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
    """Try the softmax on two equal numbers along the last dimension: one half each, or one each."""
    assert parameter.link is not None
    trial = parameter.link.function(torch.zeros((1,) * (parameter.dim() - 1) + (2,)))
    return bool(trial.flatten()[0] < (-0.5 if logarithm else 0.75))


def _logits_of(family: str, logits: Any, probs: Any) -> GaussianMoments | None:
    if logits is None and isinstance(probs, GaussianMoments) and probs.link is None:
        raise UnsupportedError(
            f"{family}(probs=...) is given uncertain probabilities that do not come straight from a softmax, so that "
            f"no Gaussian behind them is known: pass logits, {family}(logits=f), or probs=softmax(f, -1) without "
            "further functions"
        )
    return gaussian_logits(logits, probs)


@expectation_rule(td.Categorical, covariances=True)
def categorical(value: Tensor, estimator: LogitEstimator, probs: Any = None, logits: Any = None) -> Tensor:
    r"""Expected log probability of a class, :math:`\bar f_y - \mathrm E[\log\sum_c e^{f_c}]`.

    Status: the first term is exact, the second that of the estimator. Logits (or ``probs`` that are a softmax of
    them) are taken as independent Gaussians unless they share the noise of a last layer; logits that are some other
    function are averaged numerically.

    Source: Schmitt & Roth (2021), Section 3.4, Eq. 16.
    """
    f = _logits_of("Categorical", logits, probs)
    if f is None:
        return NotImplemented
    return _at_class(f.loc, value) - estimator.expected_logsumexp(f)


def _at_class(loc: Tensor, value: Tensor) -> Tensor:
    index = value.long().unsqueeze(-1)
    shape = torch.broadcast_shapes(loc.shape[:-1], value.shape)
    return loc.expand(*shape, -1).gather(-1, index.expand(*shape, 1)).squeeze(-1)


@expectation_rule(td.OneHotCategorical, covariances=True)
def one_hot_categorical(
    value: Tensor, estimator: LogitEstimator, probs: Any = None, logits: Any = None
) -> Tensor:
    """Expected log probability of a one-hot vector; the status is that of :func:`categorical`."""
    f = _logits_of("OneHotCategorical", logits, probs)
    if f is None:
        return NotImplemented
    return (value * f.loc).sum(-1) - estimator.expected_logsumexp(f)


@expectation_rule(td.Multinomial, covariances=True)
def multinomial(
    value: Tensor,
    estimator: LogitEstimator,
    total_count: Any = 1,
    probs: Any = None,
    logits: Any = None,
) -> Tensor:
    r"""Expected log probability of counts :math:`y_c` that sum to n.

    .. math:: \log n! - \sum_c\log y_c! + \sum_c y_c\bar f_c - n\,\mathrm E[\log\textstyle\sum_c e^{f_c}].

    Status: that of :func:`categorical`.
    """
    f = _logits_of("Multinomial", logits, probs)
    if f is None:
        return NotImplemented
    count = value.sum(-1)
    arrangements = torch.lgamma(count + 1) - torch.lgamma(value + 1).sum(-1)
    return arrangements + (value * f.loc).sum(-1) - count * estimator.expected_logsumexp(f)
