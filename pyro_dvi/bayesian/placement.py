# SPDX-License-Identifier: Apache-2.0
"""Move a distribution to the device and dtype of a tensor."""

import copy
from typing import TypeVar

import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor
from torch.distributions import Distribution, Transform, constraints

__all__ = ["placed_like", "tensors_of"]

D = TypeVar("D", bound=TorchDistributionMixin)


def placed_like(distribution: D, reference: Tensor) -> D:
    """Return ``distribution`` on the device and in the floating-point dtype of ``reference``.

    Distributions have no ``to`` method. This one copies the object tree that holds the tensors (base
    distributions, mixture components, transforms, caches); what is in place already is shared, not copied.

    Args:
        distribution: any distribution of Pyro or torch.
        reference: the tensor to follow.

    Example:
        >>> import pyro.distributions as dist
        >>> placed_like(dist.Normal(0.0, 1.0), torch.zeros(1, dtype=torch.float64)).sample().dtype
        torch.float64
    """
    moved: D = _moved(distribution, reference)  # type: ignore[assignment]
    return moved


def tensors_of(value: object) -> list[Tensor]:
    """List the tensors that a distribution holds, at any depth."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Distribution | Transform | constraints.Constraint):
        value = vars(value)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_of(item)]
    return []


def _moved(value: object, reference: Tensor) -> object:
    if isinstance(value, Tensor):
        return value.to(reference.device, reference.dtype if value.is_floating_point() else None)
    if isinstance(value, Distribution | Transform | constraints.Constraint):
        fields = {key: _moved(item, reference) for key, item in vars(value).items()}
        if all(fields[key] is item for key, item in vars(value).items()):
            return value
        clone = copy.copy(value)
        vars(clone).update(fields)
        return clone
    if isinstance(value, dict):
        items = {key: _moved(item, reference) for key, item in value.items()}
        return value if all(items[key] is item for key, item in value.items()) else items
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        sequence = [_moved(item, reference) for item in value]
        same = all(new is old for new, old in zip(sequence, value, strict=True))
        return value if same else tuple(sequence) if isinstance(value, tuple) else sequence
    return value
