# SPDX-License-Identifier: Apache-2.0
"""Quantiles of predictive distributions, element by element, and the score of whole distributions.

The distribution function is inverted by bisection over all floating-point numbers; that of counts adds up their
probabilities. Where none is known, a quantile is that of draws.
"""

import math
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch import distributions as td

from pyro_dvi.core.distributions import untransformed
from pyro_dvi.core.undisturbed import accelerators, forked, widest
from pyro_dvi.errors import ArgumentError
from pyro_dvi.links.noise_links import EqualMixture, PointMixture, ShapedNormal, distribution_function
from pyro_dvi.predictive.metrics import mean_distance

_AT_ONCE = 2**20  # numbers in one tensor
_COUNTS = 2**16  # whose probabilities are added up
_DRAWS = 2**12  # from which a quantile is read, at least


def marginal(fn: Any) -> Any:
    """Return the distributions of single numbers: the batch shape holds the events of ``fn``.

    Raises:
        NotImplementedError: there is no rule for this distribution.
    """
    if isinstance(fn, (td.Independent, dist.MaskedDistribution, dist.ExpandedDistribution)):
        inner = marginal(fn.base_dist)
        if isinstance(fn, dist.ExpandedDistribution):
            return inner.expand(fn.batch_shape + fn.event_shape)
        return inner
    if isinstance(fn, EqualMixture):
        return EqualMixture([marginal(each) for each in fn.each])
    if isinstance(fn, PointMixture):
        return PointMixture(marginal(fn.components), fn.weights, fn.rank + len(fn.event_shape))
    if isinstance(fn, td.MixtureSameFamily) and isinstance(
        normals := marginal(fn.component_distribution), td.Normal
    ):
        # The dimension of components goes behind those of an event.
        loc, scale = (v.movedim(-1 - len(fn.event_shape), -1) for v in (normals.loc, normals.scale))
        logits = fn.mixture_distribution.logits
        logits = logits.reshape(*fn.batch_shape, *[1] * len(fn.event_shape), -1).expand(loc.shape)
        return td.MixtureSameFamily(td.Categorical(logits=logits), td.Normal(loc, scale), validate_args=False)
    if isinstance(fn, (td.MultivariateNormal, td.LowRankMultivariateNormal, ShapedNormal)):
        return td.Normal(fn.mean, fn.variance.sqrt(), validate_args=False)
    if fn.event_shape or isinstance(fn, td.MixtureSameFamily):
        raise NotImplementedError
    return fn


def probabilities(name: str, given: Any) -> Tensor:
    """Return one probability or several as a tensor ``[]`` or ``[Q]`` of double precision.

    Raises:
        ArgumentError: something else, or not between 0 and 1.
    """
    found = torch.as_tensor(given, dtype=torch.float64)
    if found.dim() > 1 or not found.numel() or not bool(((found > 0) & (found < 1)).all()):
        raise ArgumentError(f"{name} must be a number or numbers between 0 and 1, not {given!r}")
    return found


@torch.no_grad()
def quantile(fn: Any, level: float) -> Tensor:
    """Return where the distribution function of each number reaches ``level``, of the batch and event shape.

    Status: exact up to rounding where the distribution function or the probabilities of counts are known; else from
    draws, with the same seed for every level.

    Raises:
        NotImplementedError: the distribution is over classes.
    """
    if isinstance(untransformed(fn), (td.Bernoulli, td.Categorical, td.OneHotCategorical)):
        raise NotImplementedError
    try:
        return _inverse(marginal(fn), level)
    except NotImplementedError:
        with forked(*accelerators()):
            torch.manual_seed(0)
            count = max(_DRAWS, _AT_ONCE // (fn.batch_shape + fn.event_shape).numel())
            return fn.sample((count,)).sort(0).values[math.ceil(level * count) - 1]  # type: ignore[no-any-return]


def _inverse(single: Any, level: float) -> Tensor:
    """Invert the distribution function of single numbers."""
    first = single.each[0] if isinstance(single, EqualMixture) else single
    mean = first.mean
    if first.support.is_discrete:
        points = len(getattr(first, "weights", "1"))
        return _count(single, level, max(1, min(256, _AT_ONCE // (mean.numel() * points)))).to(mean)
    if isinstance(single, EqualMixture) and (normals := _normals(single)) is not None:
        loc, scale, weights = normals
        single = td.MixtureSameFamily(td.Categorical(weights), td.Normal(loc, scale), validate_args=False)
    wide = widest(mean.device)
    as_whole = torch.int64 if wide == torch.float64 else torch.int32

    def number(place: Tensor) -> Tensor:  # the bits of floating-point numbers are in their order
        return place.abs().view(wide) * place.sign()

    largest = torch.full(single.batch_shape, torch.finfo(wide).max, dtype=wide, device=mean.device)
    high = largest.view(as_whole)
    low = -high
    for _ in range(torch.finfo(wide).bits):
        middle = (low & high) + ((low ^ high) >> 1)  # their mean, without the overflow of a sum
        below = distribution_function(single, number(middle)) < level
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return number(high).to(mean.dtype)  # whose probability is not zero: it lies in the support


def _count(single: Any, level: float, at_once: int) -> Tensor:
    """Return the smallest count up to which there is the probability ``level``: how many counts have less."""
    total: Any = 0.0
    found: Any = 0
    for start in range(0, _COUNTS, at_once):
        reached = total + _probabilities(single, start, at_once).cumsum(0)
        found, total = found + (reached < level).sum(0), reached[-1]
        if bool((total >= level).all()):
            return found  # type: ignore[no-any-return]
    raise NotImplementedError


def _probabilities(single: Any, start: int, number: int) -> Tensor:
    """Return the probabilities of so many counts, in double precision."""
    if isinstance(single, EqualMixture):
        return torch.stack([_probabilities(fn, start, number) for fn in single.each]).mean(0)
    mean = single.mean
    counts = torch.arange(start, start + number, device=mean.device).to(widest(mean.device))
    counts = counts.reshape(-1, *(1,) * mean.dim()).expand(-1, *mean.shape)
    possible = single.support.check(counts)
    log_p: Tensor = single.log_prob(torch.where(possible, counts, 0.0))
    return torch.where(possible, log_p.exp(), 0.0).to(counts.dtype)


def _normals(single: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return means, deviations and weights of the Normals that a number's distribution mixes, in the last dimension."""
    if isinstance(single, EqualMixture):
        each = [found for found in map(_normals, single.each) if found is not None]
        if len(each) < len(single.each):
            return None
        loc, scale, weights = (torch.cat(parts, -1) for parts in zip(*each, strict=True))
        return loc, scale, weights / len(each)
    if isinstance(single, td.MixtureSameFamily):
        normals, weights, dim = single.component_distribution, single.mixture_distribution.probs, -1
    elif isinstance(single, PointMixture):
        normals, weights, dim = single.components, single.weights, -1 - single.rank
    else:
        normals, weights, dim = single.expand((1, *single.batch_shape)), single.mean.new_ones(1), 0
    if not isinstance(normals, td.Normal):
        return None
    loc, scale = (value.to(widest(value.device)).movedim(dim, -1) for value in (normals.loc, normals.scale))
    return loc, scale, weights.to(loc).expand(loc.shape)


@torch.no_grad()
def crps(fn: Any, values: Tensor) -> Tensor:
    r"""Continuous ranked probability score of each number, for a Normal or a mixture of Normals.

    .. math::
        \mathrm{CRPS} = \sum_i w_i A(y - m_i, s_i^2) - \tfrac12 \sum_{i,j} w_i w_j A(m_i - m_j, s_i^2 + s_j^2),
        \qquad A(d, v) = 2 \sqrt v\,\phi(d/\sqrt v) + d\,(2\Phi(d/\sqrt v) - 1)

    Status: exact. K components cost K² terms for each number, and the memory of K.

    Raises:
        NotImplementedError: the distribution is neither.

    Source: Grimit et al. (2006), Eq. 5.
    """
    found = _normals(marginal(fn))
    if found is None:
        raise NotImplementedError
    loc, scale, weights = (value.movedim(-1, 0) for value in found)
    score = (weights * mean_distance(values.to(loc) - loc, scale)).sum(0)
    for i, weight in enumerate(weights):
        apart = mean_distance(loc[i] - loc, torch.hypot(scale[i], scale))
        score = score - 0.5 * weight * (weights * apart).sum(0)
    return score
