# SPDX-License-Identifier: Apache-2.0
"""Per-example gradients of a weight that is added to, or multiplied with, the activations of all examples."""

from collections.abc import Callable

import torch
from torch import Tensor

from pyro_dvi.curvature.per_example.uses import OfDelta, Outer, outer_rule, per_example_rule

__all__ = ["is_broadcast", "rows_summed_to", "shift_outer"]


def is_broadcast(shape: torch.Size, against: torch.Size) -> bool:
    """Whether a weight of the given shape meets every example, in the first dimension of the other operand."""
    return len(shape) < len(against) or (len(shape) == len(against) and shape[:1] == (1,))


def rows_summed_to(gradient: Tensor, shape: torch.Size) -> Tensor:
    """Undo broadcasting within each row: sum ``[M, ...]`` to ``[M, *shape]``."""
    if len(shape) == gradient.dim():  # the weight's own first dimension is 1
        return rows_summed_to(gradient, shape[1:]).reshape(len(gradient), *shape)
    aligned = (len(gradient), *[1] * (gradient.dim() - 1 - len(shape)), *shape)
    return gradient.sum_to_size(aligned).reshape(len(gradient), *shape)


def _operands(wanted: str, input: Tensor | float, other: Tensor | float) -> tuple[Tensor, Tensor] | None:
    """The weight and the activations, if the weight is the one that is broadcast."""
    weight, activations = (input, other) if wanted == "input" else (other, input)
    if not (isinstance(weight, Tensor) and isinstance(activations, Tensor)):
        return None
    return (weight, activations) if is_broadcast(weight.shape, activations.shape) else None


def shift_outer(activations: Tensor, size: int) -> Outer:
    """A vector of p numbers that is added to every row ``[M, ..., p]``: its input is 1."""
    return Outer(
        lambda part: activations.new_ones(len(activations[part]), 1, 1),
        lambda delta: delta.reshape(len(delta), -1, size).sum(1, keepdim=True),
    )


_ADDITIONS = (
    torch.add,
    torch.Tensor.add,
    torch.Tensor.add_,
    torch.Tensor.__add__,
    torch.Tensor.__iadd__,
)


@outer_rule(*_ADDITIONS)
def _add_outer(wanted: str, input: Tensor | float, other: Tensor | float) -> Outer | None:
    operands = _operands(wanted, input, other)
    if operands is None:
        return None
    weight, activations = operands
    if weight.dim() == 0 and activations.dim() == 1:
        return shift_outer(activations, 1)
    whole_rows = weight.dim() == 1 and activations.dim() > 1 and weight.shape == activations.shape[-1:]
    return shift_outer(activations, len(weight)) if whole_rows else None


@per_example_rule(*_ADDITIONS)
def _add(wanted: str, input: Tensor | float, other: Tensor | float) -> OfDelta | None:
    operands = _operands(wanted, input, other)
    if operands is None:
        return None
    shape = operands[0].shape
    return lambda delta: rows_summed_to(delta, shape)


@per_example_rule(torch.sub, torch.Tensor.sub, torch.Tensor.__sub__)
def _sub(wanted: str, input: Tensor | float, other: Tensor | float) -> OfDelta | None:
    added = _add(wanted, input, other)
    return added if added is None or wanted == "input" else lambda delta: -added(delta)


@per_example_rule(torch.mul, torch.Tensor.mul, torch.Tensor.__mul__)
def _mul(wanted: str, input: Tensor | float, other: Tensor | float) -> OfDelta | None:
    return _times(wanted, input, other, lambda weight, x: x)


@per_example_rule(torch.div, torch.Tensor.div, torch.Tensor.__truediv__)
def _div(wanted: str, input: Tensor | float, other: Tensor | float) -> OfDelta | None:
    if wanted == "input":
        return _times(wanted, input, other, lambda weight, x: 1 / x)
    return _times(wanted, input, other, lambda weight, x: -x / weight**2)


def _times(
    wanted: str, input: Tensor | float, other: Tensor | float, slope: Callable[[Tensor, Tensor], Tensor]
) -> OfDelta | None:
    operands = _operands(wanted, input, other)
    if operands is None:
        return None
    weight, activations = operands
    return lambda delta: rows_summed_to(delta * slope(weight, activations), weight.shape)
