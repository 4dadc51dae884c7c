# SPDX-License-Identifier: Apache-2.0
"""The density of a distribution: which class defines it, and which values enter it. This module needs no Pyro."""

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, distributions as td


def is_known(density: Any) -> bool:
    """Return True for a class or ``log_prob`` of torch or Pyro, whose methods belong together."""
    return getattr(density, "__module__", "").startswith(("torch.", "pyro."))


def parent_in(known: Container[type], family: type) -> type | None:
    """Return the first class among ``known`` from which a family inherits its density; None if there is none.

    Pyro's subclasses have the density of their parents, apart from missing values (:mod:`pyro_dvi.runs.missing`). Any
    other subclass that overrides ``log_prob`` has a density of its own, about which its parents say nothing.

    Example:
        >>> import pyro.distributions as dist
        >>> class Tobit(dist.Normal):
        ...     def log_prob(self, value): ...
        >>> parent_in([td.Normal], dist.Normal), parent_in([td.Normal], Tobit)
        (<class 'torch.distributions.normal.Normal'>, None)
    """
    density = getattr(family, "log_prob", None)
    for parent in family.__mro__:
        if parent in known:
            inherits = density is getattr(parent, "log_prob", None)
            return parent if inherits or is_known(density) else None
    return None


def is_of(fn: Any, *kinds: type) -> bool:
    """Return True for an instance of one of these classes that has the density of the class."""
    return parent_in(kinds, type(fn)) is not None


def keeps(fn: Any, method: str) -> bool:
    """Return False if a distribution overrides ``log_prob`` but inherits a method that belongs to the old density.

    Example:
        >>> import pyro.distributions as dist
        >>> class Tobit(dist.Normal):
        ...     def log_prob(self, value): ...
        >>> keeps(dist.Normal(0.0, 1.0), "sample"), keeps(Tobit(0.0, 1.0), "sample")
        (True, False)
    """
    order = type(untransformed(fn)).__mro__
    own, density = (next((c for c in order if name in vars(c)), object) for name in (method, "log_prob"))
    known = own in (td.Distribution, object) or is_known(density)
    return known or order.index(own) <= order.index(density)


def _inner(fn: Any) -> Any:
    """Return the distribution inside ``to_event``, ``mask`` or ``expand``, which do not change values; or None."""
    wraps = any(hasattr(fn, name) for name in ("reinterpreted_batch_ndims", "_mask", "_expanded_sizes"))
    return getattr(fn, "base_dist", None) if wraps else None


def untransformed(fn: Any) -> Any:
    """Return a distribution without the wrappers that do not change values; transforms are kept."""
    while (inner := _inner(fn)) is not None:
        fn = inner
    return fn


def mask_of(fn: Any, mask: Tensor | bool | None = None) -> Tensor | None:
    """Return a mask in the shape of one draw, True for values that are not masked; None if nothing masks them.

    It is on the device of the masks that are tensors; if the only mask is False, it is on the CPU.

    Args:
        fn: a distribution, which ``.mask()`` may mask at any depth.
        mask: a further mask of its batch shape, from ``poutine.mask``.
    """
    shape, found = fn.batch_shape + fn.event_shape, None
    while fn is not None:
        for each in (mask, getattr(fn, "_mask", None)):
            if each is not None and each is not True:
                part = torch.as_tensor(each, dtype=torch.bool)
                if part.dim():  # a number on the CPU may be combined with tensors on any device
                    part = part.reshape(part.shape + (1,) * len(fn.event_shape))
                found = part if found is None else found & part
        fn, mask = _inner(fn), None
    return None if found is None else found.expand(shape)


def with_any(mask: Tensor, event_dim: int) -> Tensor:
    """Return a mask with one entry per observation, which is True if any value of the observation is to be scored."""
    return mask.flatten(mask.dim() - event_dim).any(-1) if event_dim else mask
