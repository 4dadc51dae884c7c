# SPDX-License-Identifier: Apache-2.0
"""Likelihoods with one logit: Bernoulli, binomial, negative binomial and geometric."""

from typing import Any

import torch
from torch import Tensor
from torch import distributions as td

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.expectations.gaussian import gaussian_of
from pyro_dvi.expectations.logistic import expected_softplus
from pyro_dvi.expectations.rules import expectation_rule
from pyro_dvi.moments import GaussianMoments

_SIGMOIDS = ("sigmoid", "special_expit", "expit")


def is_gaussian_logit(logits: Any, probs: Any) -> bool:
    """Whether the parameter is a Gaussian logit, or the sigmoid of one."""
    if isinstance(logits, GaussianMoments):
        return logits.link is None
    return isinstance(probs, GaussianMoments) and probs.link is not None and probs.link.name in _SIGMOIDS


def gaussian_logit(family: str, logits: Any, probs: Any) -> GaussianMoments | None:
    """Return the Gaussian logit, None where it is some function of a Gaussian.

    Raises:
        UnsupportedError: probabilities that are a Gaussian, which leaves the unit interval.
    """
    if isinstance(probs, GaussianMoments) and probs.link is None:
        raise UnsupportedError(
            f"{family}(probs=...) is given uncertain probabilities that do not come straight from a sigmoid, so that "
            f"no Gaussian behind them is known: pass logits, {family}(logits=f), or probs=torch.sigmoid(f)"
        )
    return gaussian_of(probs if logits is None else logits) if is_gaussian_logit(logits, probs) else None


@expectation_rule(td.Bernoulli)
def bernoulli(value: Tensor, probs: Any = None, logits: Any = None) -> Tensor:
    r"""Expected log probability of :math:`y \in \{0, 1\}`, :math:`y\bar f - \mathrm E[\log(1 + e^f)]`.

    Status: exact to 1e-9 for Gaussian logits of any variance, and for ``probs`` that are a sigmoid of them.

    Example:
        >>> bernoulli(torch.ones(1), logits=GaussianMoments(torch.zeros(1), torch.ones(1)))
        tensor([-0.8061])
    """
    f = gaussian_logit("Bernoulli", logits, probs)
    return NotImplemented if f is None else value * f.loc - expected_softplus(f)


@expectation_rule(td.Binomial)
def binomial(value: Tensor, total_count: Any = 1, probs: Any = None, logits: Any = None) -> Tensor:
    r"""Expected log probability, :math:`\log\tbinom ny + y\bar f - n\,\mathrm E[\log(1 + e^f)]`.

    Status: that of :func:`bernoulli`; the count has to be certain.
    """
    f = gaussian_logit("Binomial", logits, probs)
    if f is None or isinstance(total_count, GaussianMoments):
        return NotImplemented
    n = torch.as_tensor(total_count, dtype=f.dtype, device=f.device)
    ways = torch.lgamma(n + 1) - torch.lgamma(value + 1) - torch.lgamma(n - value + 1)
    return ways + value * f.loc - n * expected_softplus(f)


@expectation_rule(td.NegativeBinomial)
def negative_binomial(value: Tensor, total_count: Any, probs: Any = None, logits: Any = None) -> Tensor:
    r"""Expected log probability, :math:`\log\tbinom{y + n - 1}y + y\bar f - (n + y)\,\mathrm E[\log(1 + e^f)]`.

    Status: that of :func:`bernoulli`; an uncertain count is averaged numerically.
    """
    f = gaussian_logit("NegativeBinomial", logits, probs)
    if f is None or isinstance(total_count, GaussianMoments):
        return NotImplemented
    n = torch.as_tensor(total_count, dtype=f.dtype, device=f.device)
    ways = torch.lgamma(n + value) - torch.lgamma(value + 1) - torch.lgamma(n)
    return ways + value * f.loc - (n + value) * expected_softplus(f)


@expectation_rule(td.Geometric)
def geometric(value: Tensor, probs: Any = None, logits: Any = None) -> Tensor:
    r"""Expected log probability of y failures, :math:`\bar f - (y + 1)\,\mathrm E[\log(1 + e^f)]`.

    Status: that of :func:`bernoulli`.
    """
    f = gaussian_logit("Geometric", logits, probs)
    return NotImplemented if f is None else f.loc - (value + 1) * expected_softplus(f)
