# SPDX-License-Identifier: Apache-2.0
"""Per-example gradients of the scales and shifts of normalisation layers."""

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.curvature.per_example.broadcasting import scaling, shift
from pyro_dvi.curvature.per_example.rules import Contribution, per_example_rule


def over_positions(gradient: Tensor) -> Tensor:
    """Sum ``[M, channels, ...]`` over positions."""
    return gradient.flatten(2).sum(2) if gradient.dim() > 2 else gradient


def _by_channel(wanted: str, input: Tensor, normalise: Callable[[Tensor], Tensor]) -> Contribution | None:
    if wanted == "bias":
        return Contribution(over_positions)
    if wanted == "weight":
        return Contribution(lambda delta, x: over_positions(delta * normalise(x)), (input,), bilinear=False)
    return None


@per_example_rule(F.batch_norm)
def _batch_norm(
    wanted: str,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Contribution | None:
    statistics = (None, None) if training else (running_mean, running_var)
    return _by_channel(wanted, input, lambda x: F.batch_norm(x, *statistics, None, None, training, 0.0, eps))


@per_example_rule(F.instance_norm)
def _instance_norm(
    wanted: str,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Contribution | None:
    if use_input_stats:
        return _by_channel(wanted, input, lambda x: F.instance_norm(x, eps=eps))
    return _by_channel(wanted, input, lambda x: F.batch_norm(x, running_mean, running_var, eps=eps))


@per_example_rule(F.group_norm)
def _group_norm(
    wanted: str,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Contribution | None:
    return _by_channel(wanted, input, lambda x: F.group_norm(x, num_groups, eps=eps))


@per_example_rule(F.layer_norm)
def _layer_norm(
    wanted: str,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Contribution | None:
    shape = (weight if wanted == "weight" else bias).shape  # type: ignore[union-attr]
    if input.dim() <= len(shape):  # a single example
        return None
    if wanted == "bias":
        return shift(shape, input)
    return scaling(shape, input, lambda x: F.layer_norm(x, normalized_shape, eps=eps))


@per_example_rule(F.rms_norm)
def _rms_norm(
    wanted: str,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Contribution | None:
    if wanted != "weight" or weight is None or input.dim() <= weight.dim():
        return None
    return scaling(weight.shape, input, lambda x: F.rms_norm(x, normalized_shape, eps=eps))
