# SPDX-License-Identifier: Apache-2.0
"""Move a distribution to the device and dtype of a tensor, and compare shapes."""

import copy
from collections.abc import Sequence
from typing import TypeVar

from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor
from torch.distributions import Distribution, Transform, constraints

D = TypeVar("D", bound=TorchDistributionMixin)


def placed_like(distribution: D, reference: Tensor) -> D:
    """Return ``distribution`` on the device and in the floating-point dtype of ``reference``.

    Distributions have no ``to`` method. This copies the object tree (base distributions, mixture components,
    transforms) with every tensor replaced by the moved one. If all are in place already, the object itself is
    returned.

    Args:
        distribution: any distribution of Pyro or torch.
        reference: the tensor to follow.

    Example:
        >>> import torch
        >>> import pyro.distributions as dist
        >>> placed_like(dist.Normal(0.0, 1.0), torch.zeros(1, dtype=torch.float64)).sample().dtype
        torch.float64
    """
    tensors = tensors_of(distribution)
    moved = [t.to(reference.device, reference.dtype if t.is_floating_point() else None) for t in tensors]
    if all(new is old for new, old in zip(moved, tensors, strict=True)):
        return distribution
    return copy.deepcopy(distribution, {id(old): new for old, new in zip(tensors, moved, strict=True)})


def tensors_of(distribution: object) -> list[Tensor]:
    """List the tensors that a distribution holds, at any depth."""
    found: dict[int, Tensor] = {}
    seen: set[int] = set()
    pending: list[object] = [distribution]
    while pending:
        value = pending.pop()
        if id(value) in seen:  # a transform and its inverse refer to each other
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            found[id(value)] = value
        elif isinstance(value, Distribution | Transform | constraints.Constraint):
            pending.extend(vars(value).values())
        elif isinstance(value, dict):
            pending.extend(value.values())
        elif isinstance(value, list | tuple):
            pending.extend(value)
    return list(found.values())


def broadcasts_to(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Whether a tensor of one shape expands to another."""
    ends = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(size in (1, wanted) for size, wanted in ends)
