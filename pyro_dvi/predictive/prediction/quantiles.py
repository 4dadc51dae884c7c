# SPDX-License-Identifier: Apache-2.0
r"""Quantiles of predictive distributions, element by element, and the score of whole distributions.

The distribution function is inverted: in closed form where the distribution has one, else by bisection. A quantile of a
mixture lies between the smallest and the largest of its components'; for any other distribution of this mean and
standard deviation Cantelli's inequality gives limits,

.. math:: m - s\sqrt{(1 - q)/q} \;\le\; Q(q) \;\le\; m + s\sqrt{q/(1 - q)}.
"""

import math
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch import distributions as td

from pyro_dvi.devices import widest
from pyro_dvi.errors import ArgumentError
from pyro_dvi.handlers.distributions import untransformed
from pyro_dvi.links.mixture import PointMixture, distribution_function
from pyro_dvi.links.noise import ShapedNormal
from pyro_dvi.metrics.regression import mean_distance

__all__ = ["crps", "marginal", "probabilities", "quantile"]

_HALVINGS = 60  # of the bracket, in double precision


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
    if fn.event_shape or getattr(fn.support, "is_discrete", True):
        raise NotImplementedError
    return fn


def probabilities(name: str, given: Any) -> Tensor:
    """Return one probability or several as a tensor ``[]`` or ``[Q]`` of double precision.

    Raises:
        ArgumentError: something else, or not between 0 and 1.
    """
    try:
        found = torch.as_tensor(given, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        found = torch.empty(0)
    if found.dim() > 1 or not found.numel() or not bool(((found > 0) & (found < 1)).all()):
        raise ArgumentError(
            f"{name} must lie between 0 and 1, a number or a sequence of numbers, not {given!r}"
        )
    return found


@torch.no_grad()
def quantile(fn: Any, level: float) -> Tensor:
    """Return where the distribution function of each number reaches ``level``, of the batch and event shape.

    Raises:
        NotImplementedError: the distribution has no distribution function, or no variance to look for it by.
    """
    single = marginal(fn)
    q = torch.as_tensor(level, dtype=single.mean.dtype, device=single.mean.device)
    try:
        found: Tensor = single.icdf(q)
        return found.expand(single.batch_shape)
    except NotImplementedError:
        pass
    wide = widest(single.mean.device)
    if isinstance(single, PointMixture):
        each = quantile(single.components, level).to(wide)
        low, high = each.amin(-1 - single.rank), each.amax(-1 - single.rank)
    else:
        mean, spread = single.mean.to(wide), single.variance.to(wide).sqrt()
        if not bool((mean.isfinite() & spread.isfinite()).all()):
            raise NotImplementedError
        low = mean - spread * math.sqrt((1 - level) / level)
        high = mean + spread * math.sqrt(level / (1 - level))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        below = distribution_function(single, middle) < level
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return high.to(single.mean.dtype)  # whose probability is not zero: it lies in the support


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
    single = marginal(fn)
    if isinstance(single, td.MixtureSameFamily):
        normals, weights = single.component_distribution, single.mixture_distribution.probs.movedim(-1, 0)
        dim = -1
    elif isinstance(single, PointMixture):
        normals, weights, dim = single.components, single.weights, -1 - single.rank
    else:
        normals, weights, dim = single.expand((1, *single.batch_shape)), single.mean.new_ones(1), 0
    if not isinstance(untransformed(normals), td.Normal):
        raise NotImplementedError
    wide = widest(weights.device)
    loc, scale = (value.to(wide).movedim(dim, 0) for value in (normals.mean, normals.stddev))
    weights = weights.to(wide).reshape(*weights.shape, *[1] * (loc.dim() - weights.dim()))
    score = (weights * mean_distance(values.to(wide) - loc, scale)).sum(0)
    for i, weight in enumerate(weights):
        apart = mean_distance(loc[i] - loc, torch.hypot(scale[i], scale))
        score = score - 0.5 * weight * (weights * apart).sum(0)
    return score
