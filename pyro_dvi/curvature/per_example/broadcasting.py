# SPDX-License-Identifier: Apache-2.0
r"""Per-example gradients of a weight that is added to, or multiplied by, the activations of all examples.

This includes the scales and shifts of normalisation layers.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.curvature.per_example.example_rules import Contribution, Outer, per_example_rule


def is_broadcast(shape: torch.Size, against: torch.Size) -> bool:
    """Return whether a weight of this shape is broadcast over the first dimension (examples) of the other operand."""
    return len(shape) < len(against) or (len(shape) == len(against) and shape[:1] == (1,))


def rows_summed_to(gradient: Tensor, shape: torch.Size) -> Tensor:
    """Sum ``[M, ...]`` to ``[M, *shape]``, which undoes broadcasting within each row."""
    if len(shape) == gradient.dim():  # the weight's own first dimension is 1
        return rows_summed_to(gradient, shape[1:]).reshape(len(gradient), *shape)
    aligned = (len(gradient), *[1] * (gradient.dim() - 1 - len(shape)), *shape)
    return gradient.sum_to_size(aligned).reshape(len(gradient), *shape)


def scaling(shape: torch.Size, x: Tensor, factor: Callable[[Tensor], Tensor] | None = None) -> Contribution:
    """Return the contribution to a weight that is multiplied elementwise by x or a function of x."""

    def gradients(delta: Tensor, x: Tensor) -> Tensor:
        return rows_summed_to(delta * (x if factor is None else factor(x)), shape)

    return Contribution(gradients, (x,), bilinear=factor is None)


def shift(shape: torch.Size, activations: Tensor, factor: float = 1) -> Contribution:
    """Return the contribution to a weight that is added, times ``factor``, to a function of the activations."""

    def scaled(gradient: Tensor) -> Tensor:
        return gradient if factor == 1 else factor * gradient

    outer = None
    if len(shape) < 2:  # a vector of p numbers per row, with input 1
        outer = Outer(
            lambda x: x.new_ones(len(x), 1, 1),
            lambda delta: scaled(delta.reshape(len(delta), -1, shape.numel()).sum(1, keepdim=True)),
        )
    return Contribution(lambda delta, x: scaled(rows_summed_to(delta, shape)), (activations,), outer=outer)


def _operands(wanted: str, input: Tensor | float, other: Tensor | float) -> tuple[Tensor, Tensor] | None:
    """Return the weight and the activations if the weight is broadcast, otherwise None."""
    weight, activations = (input, other) if wanted == "input" else (other, input)
    if not (isinstance(weight, Tensor) and isinstance(activations, Tensor)):
        return None
    return (weight, activations) if is_broadcast(weight.shape, activations.shape) else None


@per_example_rule(torch.add, torch.Tensor.add, torch.Tensor.add_, torch.Tensor.__add__, torch.Tensor.__iadd__)
def _add(
    wanted: str, input: Tensor | float, other: Tensor | float, *, alpha: float = 1
) -> Contribution | None:
    operands = _operands(wanted, input, other)
    if operands is None:
        return None
    weight, activations = operands
    return shift(weight.shape, activations, alpha if wanted == "other" else 1)


@per_example_rule(torch.sub, torch.Tensor.sub, torch.Tensor.__sub__)
def _sub(
    wanted: str, input: Tensor | float, other: Tensor | float, *, alpha: float = 1
) -> Contribution | None:
    return _add(wanted, input, other, alpha=-alpha)


@per_example_rule(torch.mul, torch.Tensor.mul, torch.Tensor.__mul__)
def _mul(wanted: str, input: Tensor | float, other: Tensor | float) -> Contribution | None:
    operands = _operands(wanted, input, other)
    return None if operands is None else scaling(operands[0].shape, operands[1])


@per_example_rule(torch.div, torch.Tensor.div, torch.Tensor.__truediv__)
def _div(wanted: str, input: Tensor | float, other: Tensor | float) -> Contribution | None:
    operands = _operands(wanted, input, other)
    if operands is None:
        return None
    weight, x = operands
    return scaling(weight.shape, x, lambda x: 1 / x if wanted == "input" else -x / weight**2)


@per_example_rule(torch.Tensor.expand)
def _expand(wanted: str, input: Tensor, *sizes: Any) -> Contribution | None:
    return _copies(input, input.expand(*sizes).shape)


@per_example_rule(torch.Tensor.repeat)
def _repeat(wanted: str, input: Tensor, *sizes: Any) -> Contribution | None:
    times = torch.Size(sizes[0] if isinstance(sizes[0], list | tuple) else sizes)
    shape = torch.Size((*[1] * (len(times) - input.dim()), *input.shape))
    return _copies(input, torch.Size((*times[:1], *shape[1:]))) if set(times[1:]) <= {1} else None


def _copies(weight: Tensor, shape: torch.Size) -> Contribution | None:
    """Return the contribution to a weight that is copied for each example, such as a class token."""
    if not is_broadcast(weight.shape, shape):
        return None
    return Contribution(lambda delta: rows_summed_to(delta, weight.shape))


def over_positions(gradient: Tensor) -> Tensor:
    """Sum ``[M, channels, ...]`` over positions."""
    return gradient.flatten(2).sum(2) if gradient.dim() > 2 else gradient


def _affine_norm(function: Callable[..., Tensor], by_channel: bool) -> None:
    """Register a rule for a function that normalises, multiplies by a weight and adds a bias.

    Args:
        function: function with the arguments ``input``, ``weight`` and ``bias``.
        by_channel: whether the weight has one entry per channel (the second dimension); if not, it has the shape of the
            last dimensions.
    """
    signature = inspect.signature(function)

    def rule(wanted: str, *args: Any, **kwargs: Any) -> Contribution | None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        x, shape = bound.arguments.pop("input"), bound.arguments[wanted].shape
        if x.dim() <= len(shape) or (by_channel and x.shape[1:2] != shape):  # a single example
            return None
        arguments = bound.arguments | dict.fromkeys({"weight", "bias"} & bound.arguments.keys())
        if arguments.get("training") or arguments.get("use_input_stats"):
            arguments |= {"running_mean": None, "running_var": None}  # otherwise they would be updated

        def normalised(x: Tensor) -> Tensor:
            return function(x, **arguments)

        if not by_channel:
            return shift(shape, x) if wanted == "bias" else scaling(shape, x, normalised)
        if wanted == "bias":
            return Contribution(over_positions)
        return Contribution(lambda delta, x: over_positions(delta * normalised(x)), (x,), bilinear=False)

    first = inspect.Parameter("wanted", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    rule.__signature__ = signature.replace(parameters=[first, *signature.parameters.values()])  # type: ignore[attr-defined]
    per_example_rule(function)(rule)


_BY_CHANNEL: tuple[Callable[..., Tensor], ...] = (F.batch_norm, F.instance_norm, F.group_norm)
_BY_FEATURE: tuple[Callable[..., Tensor], ...] = (F.layer_norm, F.rms_norm)
for _function in _BY_CHANNEL + _BY_FEATURE:
    _affine_norm(_function, _function in _BY_CHANNEL)
