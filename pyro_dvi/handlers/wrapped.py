# SPDX-License-Identifier: Apache-2.0
"""Distributions around other distributions: reach the innermost, and put another in its place."""

from collections.abc import Callable
from typing import Any

import pyro.distributions as dist
from torch import distributions as td

__all__ = ["WRAPPERS", "innermost", "rewrapped", "untransformed"]

# Distributions around another one, which take it as it is.
WRAPPERS = (td.Independent, dist.MaskedDistribution, dist.ExpandedDistribution, td.TransformedDistribution)


def innermost(fn: Any) -> Any:
    """Return a distribution without what is wrapped around it.

    A distribution that is a transformed one by its nature (LogNormal, Gumbel) is not taken apart.
    """
    while isinstance(fn, WRAPPERS) and not _is_named(fn):
        fn = fn.base_dist
    return fn


def untransformed(fn: Any) -> Any:
    """Return a distribution without what leaves values as they are: independence, masks, expansion; not transforms."""
    while isinstance(fn, WRAPPERS) and not isinstance(fn, td.TransformedDistribution):
        fn = fn.base_dist
    return fn


def _is_named(fn: Any) -> bool:
    plain = (td.TransformedDistribution, dist.TransformedDistribution)
    return isinstance(fn, td.TransformedDistribution) and type(fn) not in plain


def rewrapped(fn: Any, replace: Callable[[Any], Any], lead: tuple[int, ...] = ()) -> Any:
    """Return ``fn`` with its innermost distribution replaced.

    Args:
        fn: a distribution.
        replace: gives the new innermost distribution for the old one.
        lead: batch dimensions that the new one has on the left of the old one's.
    """
    if isinstance(fn, td.Independent):
        return rewrapped(fn.base_dist, replace, lead).to_event(fn.reinterpreted_batch_ndims)
    if isinstance(fn, dist.MaskedDistribution):
        return rewrapped(fn.base_dist, replace, lead).mask(fn._mask)
    if isinstance(fn, dist.ExpandedDistribution):
        return rewrapped(fn.base_dist, replace, lead).expand((*lead, *fn.batch_shape))
    if isinstance(fn, td.TransformedDistribution) and not _is_named(fn):
        return dist.TransformedDistribution(rewrapped(fn.base_dist, replace, lead), fn.transforms)
    return replace(fn)
