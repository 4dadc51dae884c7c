# SPDX-License-Identifier: Apache-2.0
"""The density of a distribution: which class defines it, and which values enter it. This module needs no Pyro."""

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor


def parent_in(known: Container[type], family: type) -> type | None:
    """Return the first class among ``known`` from which a family inherits its density; None if there is none.

    Pyro's classes have the density of torch's classes of the same name. Any other subclass that overrides ``log_prob``
    has a density of its own, about which its parents say nothing.

    Example:
        >>> import pyro.distributions as dist
        >>> class Tobit(dist.Normal):
        ...     def log_prob(self, value): ...
        >>> parent_in([td.Normal], dist.Normal), parent_in([td.Normal], Tobit)
        (<class 'torch.distributions.normal.Normal'>, None)
    """
    for parent in family.__mro__:
        if parent in known:
            twin = family.__name__ == parent.__name__ and family.__module__.startswith("pyro.distributions.")
            inherits = getattr(family, "log_prob", None) is getattr(parent, "log_prob", None)
            return parent if twin or inherits else None
    return None


def is_of(fn: Any, *kinds: type) -> bool:
    """Return True for an instance of one of these classes that has the density of the class."""
    return parent_in(kinds, type(fn)) is not None


def is_wrapper(fn: Any) -> bool:
    """Return True for a distribution around another one with the same values: ``to_event``, ``mask`` or ``expand``."""
    own = ("reinterpreted_batch_ndims", "_mask", "_expanded_sizes")
    return hasattr(fn, "base_dist") and any(hasattr(fn, name) for name in own)


def untransformed(fn: Any) -> Any:
    """Return a distribution without the wrappers that do not change values; transforms are kept."""
    while is_wrapper(fn):
        fn = fn.base_dist
    return fn


def mask_of(fn: Any, mask: Tensor | bool | None = None) -> Tensor | None:
    """Return a mask in the shape of one draw, True for values that are not masked; None if nothing masks them.

    Args:
        fn: a distribution, which ``.mask()`` may mask at any depth.
        mask: a further mask of its batch shape, from ``poutine.mask``.
    """
    masks, shape, found = [(mask, len(fn.event_shape))], fn.batch_shape + fn.event_shape, None
    while is_wrapper(fn):
        masks.append((getattr(fn, "_mask", None), len(fn.event_shape)))
        fn = fn.base_dist
    for each, event_dim in masks:
        if each is not None and each is not True:
            part = torch.as_tensor(each, dtype=torch.bool)
            part = part.reshape(part.shape + (1,) * event_dim).expand(shape)
            found = part if found is None else found & part
    return found


def with_any(mask: Tensor, event_dim: int) -> Tensor:
    """Return a mask with one entry per observation, which is True if any value of the observation is to be scored."""
    return mask.flatten(mask.dim() - event_dim).any(-1) if event_dim else mask
