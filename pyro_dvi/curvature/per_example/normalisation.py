# SPDX-License-Identifier: Apache-2.0
"""Per-example gradients of the scales and shifts of normalisation layers."""

import inspect
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.curvature.per_example.broadcasting import scaling, shift
from pyro_dvi.curvature.per_example.rules import Contribution, per_example_rule


def over_positions(gradient: Tensor) -> Tensor:
    """Sum ``[M, channels, ...]`` over positions."""
    return gradient.flatten(2).sum(2) if gradient.dim() > 2 else gradient


def _affine_norm(function: Callable[..., Tensor], by_channel: bool) -> None:
    """Register a function that normalises, multiplies by a weight and adds a bias.

    Args:
        function: with arguments of these names, and ``input``.
        by_channel: weights belong to channels, the second dimension; else to the last dimensions.
    """
    signature = inspect.signature(function)

    def rule(wanted: str, *args: Any, **kwargs: Any) -> Contribution | None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        x, shape = bound.arguments.pop("input"), bound.arguments[wanted].shape
        if x.dim() <= len(shape):  # a single example
            return None
        arguments = bound.arguments | dict.fromkeys({"weight", "bias"} & bound.arguments.keys())
        if arguments.get("training") or arguments.get("use_input_stats"):
            arguments |= {"running_mean": None, "running_var": None}  # which it would update

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
