# SPDX-License-Identifier: Apache-2.0
r"""Statistics, densities, quantiles and CRPS of a predictive distribution, and masks of its observations.

For scalars, quantiles are computed by inverting the distribution function with bisection over all floating-point
numbers; for counts, by adding up probabilities. If neither the distribution function nor the probabilities are
available, quantiles are computed from draws.
"""

import math
from contextlib import suppress
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor, distributions as td

from pyro_dvi.core.densities import is_of, keeps, untransformed, with_any
from pyro_dvi.core.distributions import rewrapped, tensors_of
from pyro_dvi.core.undisturbed import accelerators, forked, widest
from pyro_dvi.errors import ArgumentError, DataError, UnsupportedError
from pyro_dvi.expectations.closed_forms import mean_distance
from pyro_dvi.links.noise_links import EqualMixture, PointMixture, ShapedNormal, distribution_function
from pyro_dvi.runs.predictive_of_outputs import PartlyCounted


def statistics(fn: Any, observed: Tensor | None) -> dict[str, Tensor]:
    """Return the statistics that a mixture averages over its components, in the shapes that the distribution returns.

    Values are not checked, because ``vmap``, which computes the statistics of many draws, cannot read them.

    Args:
        fn: the predictive distribution of one draw.
        observed: values to score, in the shape of one draw; None if there are none.

    Returns:
        ``mean`` and ``variance`` (of the one-hot encoding for classes), if the distribution has them;
        ``function_variance``, the part of the variance due to the posterior, if the distribution provides it;
        for classes, ``log_probabilities`` and the ``entropy`` of each label; ``log_likelihood`` of the observed values.
    """
    found: dict[str, Tensor] = {}
    classes = class_log_probabilities(fn)
    if classes is not None:
        p = classes.exp()
        found["log_probabilities"] = classes
        found["entropy"] = torch.special.entr(p).sum(-1)
        found["mean"] = p[..., 1] if isinstance(untransformed(fn), td.Bernoulli) else p
        found["variance"] = found["mean"] * (1 - found["mean"])
    else:
        try:
            found["mean"], found["variance"] = fn.mean, fn.variance
            if (of_function := getattr(untransformed(fn), "function_variance", None)) is not None:
                found["function_variance"] = of_function.expand_as(found["variance"])
        except (NotImplementedError, AttributeError):
            found.clear()
    if observed is not None:
        found["log_likelihood"] = fn.log_prob(as_drawn(fn, observed))
    return found


def class_log_probabilities(fn: Any) -> Tensor | None:
    """Log-probabilities, with classes in the last dimension, or None if ``fn`` is not a distribution over classes."""
    base = untransformed(fn)
    if isinstance(base, td.Bernoulli):
        return torch.nn.functional.logsigmoid(torch.stack([-base.logits, base.logits], -1))
    if isinstance(base, (td.Categorical, td.OneHotCategorical)):
        return torch.log_softmax(base.logits, -1)
    return None


def checked_log_prob(fn: Any, values: Tensor, site: str) -> Tensor:
    """Return the log density of ``values``, which must have the shape of one draw and lie in the support.

    Raises:
        DataError: if the values have the wrong shape (broadcasting would then score every value against every
            prediction), are not numbers, or lie outside the support.
    """
    expected = tuple(fn.batch_shape) + tuple(fn.event_shape)
    kind = type(untransformed(fn)).__name__
    if tuple(values.shape) != expected:
        raise DataError(
            f"site {site!r} ({kind}): observed values have shape {tuple(values.shape)}, but predictions {expected}"
        )
    values = as_drawn(fn, values)
    inside = ~values.isnan() if fn.support is None else fn.support.check(values)
    if not bool(inside.all()):
        if lost := int(torch.isnan(values).sum()):
            raise DataError(f"site {site!r}: the observation contains {lost} NaN: drop or mask these rows")
        raise DataError(
            f"site {site!r}: some of the observed values, which range from {float(values.min()):.6g} to "
            f"{float(values.max()):.6g}, are outside the support of {kind}"
        )
    log_prob: Tensor = fn.log_prob(values)
    return log_prob


def mixture_log_prob(site: str, fn: Any, values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the log density of values in the shape of one draw, after a check against every component's support."""
    each = getattr(fn, "each", [fn])
    values = filled(values, mask, each[0])
    log_probs = torch.stack([checked_log_prob(scoring_parts(one, mask, site), values, site) for one in each])
    return log_probs.logsumexp(0) - math.log(len(each))


def filled(values: Tensor, mask: Tensor | None, fn: Any) -> Tensor:
    """Return ``values``; masked values are replaced by values in the support, because they may lie outside it.

    Args:
        values: values in the shape of one draw.
        mask: True for the values to score, in the same shape; None to score all.
        fn: the distribution that will score them.
    """
    if mask is None or mask.shape != values.shape:  # another shape raises an error when the values are scored
        return values
    with forked(values.device):
        return torch.where(mask, values, fn.sample().to(values))


def _cuts_events(mask: Tensor, event_dim: int) -> bool:
    return bool((with_any(mask, event_dim) & with_any(~mask, event_dim)).any())


def both_masks(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Return a mask that is True where both masks are True; None stands for a mask that is True everywhere."""
    if first is None or second is None:
        return second if first is None else first
    return first & second


def scoring_parts(fn: Any, mask: Tensor | None, site: str) -> Any:
    """Return a distribution that scores only the parts of events that a mask keeps.

    Raises:
        UnsupportedError: the mask excludes parts of events that the distribution cannot score in part.
    """
    event_dim = len(fn.event_shape)
    if mask is None or not event_dim or not _cuts_events(mask, event_dim):
        return fn
    if not untransformed(fn).event_shape:  # independent elements
        return rewrapped(fn, lambda elements: dist.MaskedDistribution(elements, mask))
    parts = fn.components if isinstance(fn, PointMixture) else fn
    if type(parts) in (td.MultivariateNormal, dist.MultivariateNormal, ShapedNormal):  # of a linearised model
        counted = PartlyCounted(parts, mask)
        return counted if parts is fn else type(fn)(counted, fn.weights, fn.rank)
    inner = fn
    while isinstance(
        inner, (td.Independent, dist.MaskedDistribution, dist.ExpandedDistribution, PointMixture)
    ):
        if isinstance(inner, dist.MaskedDistribution):
            return fn
        inner = inner.components if isinstance(inner, PointMixture) else inner.base_dist
    raise UnsupportedError(
        f"the mask of site {site!r} excludes parts of single observations: mask the distribution before to_event, as "
        "in dist.Normal(...).mask(mask).to_event(1), also when the model is called without an observation"
    )


def as_drawn(fn: Any, values: Tensor) -> Tensor:
    """Return ``values``; integers and booleans are converted to the dtype of the distribution's draws."""
    if values.is_floating_point() or isinstance(untransformed(fn), td.Categorical):
        return values
    kinds = [tensor.dtype for tensor in tensors_of(fn) if tensor.is_floating_point()]
    return values.to(kinds[0] if kinds else torch.get_default_dtype())


_AT_ONCE = 2**20  # largest number of elements in one tensor
_COUNTS = 2**16  # largest number of counts whose probabilities are added up
_DRAWS = 2**12  # smallest number of draws from which a quantile is computed


def marginal(fn: Any) -> Any:
    """Return the marginal distributions of single elements: events of ``fn`` become part of the batch shape.

    Raises:
        NotImplementedError: if there is no rule for this distribution.
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
        # The dimension of components is moved behind the event dimensions.
        loc, scale = (v.movedim(-1 - len(fn.event_shape), -1) for v in (normals.loc, normals.scale))
        logits = fn.mixture_distribution.logits
        logits = logits.reshape(*fn.batch_shape, *[1] * len(fn.event_shape), -1).expand(loc.shape)
        return td.MixtureSameFamily(td.Categorical(logits=logits), td.Normal(loc, scale), validate_args=False)
    if is_of(fn, td.MultivariateNormal, td.LowRankMultivariateNormal, ShapedNormal):
        return td.Normal(fn.mean, fn.variance.sqrt(), validate_args=False)
    if (
        fn.event_shape
        or isinstance(fn, td.MixtureSameFamily)
        or not keeps(fn, "icdf")
        or not keeps(fn, "cdf")
    ):
        raise NotImplementedError
    return fn


def probabilities(name: str, given: Any) -> Tensor:
    """Return one probability as a tensor ``[]``, or several as a tensor ``[Q]``, in double precision.

    Raises:
        ArgumentError: if ``given`` is neither a probability strictly between 0 and 1 nor a sequence of these.
    """
    found = torch.as_tensor(given, dtype=torch.float64)
    if found.dim() > 1 or not found.numel() or not bool(((found > 0) & (found < 1)).all()):
        raise ArgumentError(f"{name} must be one or several numbers between 0 and 1, not {given!r}")
    return found


@torch.no_grad()
def quantile(fn: Any, level: float) -> Tensor:
    """Return the quantile of each element at probability ``level``, in the batch and event shape.

    Status: exact up to rounding if the distribution function or the probabilities of counts are available. Otherwise
    the quantile is computed from draws, with the same seed for every level.

    Raises:
        NotImplementedError: if the distribution is over classes.
    """
    if class_log_probabilities(fn) is not None or not keeps(fn, "sample"):
        raise NotImplementedError
    try:
        return _inverse(marginal(fn), level)
    except NotImplementedError:
        with forked(*accelerators()):
            torch.manual_seed(0)
            count = max(_DRAWS, _AT_ONCE // (fn.batch_shape + fn.event_shape).numel())
            return fn.sample((count,)).sort(0).values[math.ceil(level * count) - 1]  # type: ignore[no-any-return]


def _inverse(single: Any, level: float) -> Tensor:
    """Invert the distribution function of scalars."""
    first = single.each[0] if isinstance(single, EqualMixture) else single
    mean = first.mean
    if first.support.is_discrete:
        points = len(getattr(first, "weights", "1"))
        return _count(single, level, max(1, min(256, _AT_ONCE // (mean.numel() * points)))).to(mean)
    if isinstance(single, EqualMixture) and (normals := _normals(single)) is not None:
        loc, scale, weights = normals
        single = td.MixtureSameFamily(td.Categorical(weights), td.Normal(loc, scale), validate_args=False)
    with suppress(NotImplementedError):
        found: Tensor = single.icdf(torch.as_tensor(level, dtype=mean.dtype, device=mean.device))
        return found.expand(single.batch_shape)
    wide = widest(mean.device)
    as_whole = torch.int64 if wide == torch.float64 else torch.int32

    # The bits of floating-point numbers, read as integers, have the same order.
    def number(place: Tensor) -> Tensor:
        return place.abs().view(wide) * place.sign()

    largest = torch.full(single.batch_shape, torch.finfo(wide).max, dtype=wide, device=mean.device)
    high = largest.view(as_whole)
    low = -high
    for _ in range(torch.finfo(wide).bits):
        middle = (low & high) + ((low ^ high) >> 1)  # their mean, without the overflow of a sum
        below = distribution_function(single, number(middle)) < level
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return number(high).to(mean.dtype)  # the upper end, which lies in the support


def _count(single: Any, level: float, at_once: int) -> Tensor:
    """Return the smallest count whose cumulative probability is at least ``level``."""
    total: Any = 0.0
    found: Any = 0
    for start in range(0, _COUNTS, at_once):
        reached = total + _probabilities(single, start, at_once).cumsum(0)
        found, total = found + (reached < level).sum(0), reached[-1]
        if bool((total >= level).all()):
            return found  # type: ignore[no-any-return]
    raise NotImplementedError


def _probabilities(single: Any, start: int, number: int) -> Tensor:
    """Return the probabilities of ``number`` consecutive counts, beginning with ``start``, in double precision."""
    if isinstance(single, EqualMixture):
        return torch.stack([_probabilities(fn, start, number) for fn in single.each]).mean(0)
    mean = single.mean
    counts = torch.arange(start, start + number, device=mean.device).to(widest(mean.device))
    counts = counts.reshape(-1, *(1,) * mean.dim()).expand(-1, *mean.shape)
    possible = single.support.check(counts)
    log_p: Tensor = single.log_prob(torch.where(possible, counts, 0.0))
    return torch.where(possible, log_p.exp(), 0.0).to(counts.dtype)


def _normals(single: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return means, scales and weights of a mixture of Normals, in the last dimension; None for other distributions."""
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
    elif isinstance(single, td.Normal):
        normals, weights, dim = single.expand((1, *single.batch_shape)), single.mean.new_ones(1), 0
    else:
        return None
    if not isinstance(normals, td.Normal) or not is_of(normals, td.Normal):
        return None
    loc, scale = (value.to(widest(value.device)).movedim(dim, -1) for value in (normals.loc, normals.scale))
    return loc, scale, weights.to(loc).expand(loc.shape)


@torch.no_grad()
def crps(fn: Any, values: Tensor) -> Tensor:
    r"""Return the continuous ranked probability score of each element, for a Normal or a mixture of Normals.

    .. math::
        \mathrm{CRPS} = \sum_i w_i A(y - m_i, s_i^2) - \tfrac12 \sum_{i,j} w_i w_j A(m_i - m_j, s_i^2 + s_j^2),
        \qquad A(d, v) = 2 \sqrt v\,\phi(d/\sqrt v) + d\,(2\Phi(d/\sqrt v) - 1)

    Status: exact. For K components, each element needs K² terms, but memory for only K of them.

    Raises:
        NotImplementedError: if the distribution is neither a Normal nor a mixture of Normals.

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
