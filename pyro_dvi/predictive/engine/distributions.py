# SPDX-License-Identifier: Apache-2.0
"""What a distribution is made of: its tensors, the same distribution with others, whether it may exist."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch import distributions as td
from torch.distributions import constraints

_CONSTANT = (type(None), bool, int, float, str, type, torch.Size, torch.dtype, torch.device)


def tensors_of(fn: Any) -> list[Tensor]:
    """Return every tensor in a distribution, those of distributions and transforms inside it among them.

    Raises:
        TypeError: it holds something that may hide tensors, a function for example.
    """
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _mapped(fn, note)
    return found


def with_tensors(fn: Any, tensors: Iterable[Tensor]) -> Any:
    """Return a copy of a distribution with other tensors, in the order of :func:`tensors_of`."""
    given = iter(tensors)
    return _mapped(fn, lambda _: next(given))


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, _CONSTANT):
        return value
    if isinstance(value, (td.Distribution, td.Transform, constraints.Constraint)):
        made, parts = copy.copy(value), dict(vars(value))
        if isinstance(value, td.Transform) and not isinstance(value, type(td.ExpTransform().inv)):
            parts["_inv"] = None  # made of the transform itself when it is asked for
        vars(made).update({name: _mapped(part, function) for name, part in parts.items()})
        return made
    if isinstance(value, dict):
        return {name: _mapped(part, function) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(part, function) for part in value)
    raise TypeError(f"{type(value).__name__} in a distribution")
