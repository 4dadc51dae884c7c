# SPDX-License-Identifier: Apache-2.0
"""Statistics and densities of one predictive distribution, and masks of its observations."""

import math
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch import distributions as td

from pyro_dvi.core.distributions import tensors_of, untransformed
from pyro_dvi.core.undisturbed import forked
from pyro_dvi.errors import DataError, UnsupportedError
from pyro_dvi.links.noise_links import PointMixture

Statistics = dict[str, Tensor]


def statistics(fn: Any, observed: Tensor | None) -> Statistics:
    """Return the numbers that a mixture averages, in the shapes that the distribution gives them.

    A plain mapping of tensors without any check of values, so that it may be computed for many draws by ``vmap``.

    Args:
        fn: the predictive distribution of one draw.
        observed: values to score, of the shape of one draw; None where there are none.

    Returns:
        ``mean`` and ``variance`` (of the one-hot code for classes), where the distribution has them, and the part of
        the variance that is the posterior's, where it knows it;
        ``log_probabilities``, and ``entropy`` of each label, for classes; ``log_likelihood`` of what was observed.
    """
    found: Statistics = {}
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
    """Log-probabilities of the classes in the last dimension, or None if ``fn`` is not over classes."""
    base = untransformed(fn)
    if isinstance(base, td.Bernoulli):
        return torch.nn.functional.logsigmoid(torch.stack([-base.logits, base.logits], -1))
    if isinstance(base, (td.Categorical, td.OneHotCategorical)):
        return torch.log_softmax(base.logits, -1)
    return None


def checked_log_prob(fn: Any, values: Tensor, site: str) -> Tensor:
    """Log density of ``values``, which must have the shape of one draw and lie in the support.

    Raises:
        DataError: another shape (broadcasting would score every value against every prediction), values that are no
            numbers, or impossible ones.
    """
    expected = tuple(fn.batch_shape) + tuple(fn.event_shape)
    kind = type(untransformed(fn)).__name__
    if tuple(values.shape) != expected:
        raise DataError(
            f"site {site!r} ({kind}): observed values have shape {tuple(values.shape)}, the predictions {expected}"
        )
    values = as_drawn(fn, values)
    inside = fn.support is None or bool(fn.support.check(values).all())
    if not inside:
        raise DataError(
            f"site {site!r}: observed values from {float(values.min()):.6g} to {float(values.max()):.6g} include "
            f"some that {kind} cannot give"
        )
    log_prob: Tensor = fn.log_prob(values)
    return log_prob


def mixture_log_prob(site: str, fn: Any, values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Log density of values of the shape of one draw, checked for every component; anything where the mask has none."""
    each = getattr(fn, "each", [fn])
    check_events(each[0], mask, site)
    values = filled(values, mask, each[0])
    log_probs = torch.stack([checked_log_prob(one, values, site) for one in each])
    return log_probs.logsumexp(0) - math.log(len(each))


def filled(values: Tensor, mask: Tensor | None, fn: Any) -> Tensor:
    """Return ``values`` with a possible value wherever the mask leaves one out; what stands there need not be one.

    Args:
        values: of the shape of one draw.
        mask: which of them count, of the same shape; None if all do.
        fn: the distribution that is to score them.
    """
    if mask is None or mask.shape != values.shape:  # another shape is reported where they are scored
        return values
    with forked(values.device):
        return torch.where(mask, values, fn.sample().to(values))


def with_any(mask: Tensor, event_dim: int) -> Tensor:
    """Which observations have any value that counts."""
    return mask.flatten(mask.dim() - event_dim).any(-1) if event_dim else mask


def _cuts_events(mask: Tensor, event_dim: int) -> bool:
    return bool((with_any(mask, event_dim) & with_any(~mask, event_dim)).any())


def both_masks(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Return which values both masks let count; without a mask all do."""
    if first is None or second is None:
        return second if first is None else first
    return first & second


def check_events(fn: Any, mask: Tensor | None, site: str) -> None:
    """Refuse to score a part of an event with a distribution that knows nothing of the mask."""
    event_dim = len(fn.event_shape)
    if mask is None or not event_dim or not _cuts_events(mask, event_dim):
        return
    while isinstance(fn, (td.Independent, dist.MaskedDistribution, dist.ExpandedDistribution, PointMixture)):
        if isinstance(fn, dist.MaskedDistribution):
            return
        fn = fn.components if isinstance(fn, PointMixture) else fn.base_dist
    raise UnsupportedError(
        f"the mask of site {site!r} leaves out parts of single observations: mask the distribution before to_event, "
        "as dist.Normal(...).mask(mask).to_event(1), also where the model is given no observation"
    )


def as_drawn(fn: Any, values: Tensor) -> Tensor:
    """Return whole numbers and truth values in the dtype that the distribution draws."""
    if values.is_floating_point() or isinstance(untransformed(fn), td.Categorical):
        return values
    kinds = [tensor.dtype for tensor in tensors_of(fn) if tensor.is_floating_point()]
    return values.to(kinds[0] if kinds else torch.get_default_dtype())
