# SPDX-License-Identifier: Apache-2.0
"""Per-example gradients of the scales and shifts of normalisation layers."""

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.curvature.per_example.broadcasting import rows_summed_to
from pyro_dvi.curvature.per_example.uses import OfDelta, per_example_rule


def _over_positions(gradient: Tensor) -> Tensor:
    """Sum ``[M, channels, ...]`` over positions."""
    return gradient.flatten(2).sum(2) if gradient.dim() > 2 else gradient


def _by_channel(wanted: str, normalised: Callable[[], Tensor]) -> OfDelta | None:
    if wanted == "bias":
        return _over_positions
    return (lambda delta: _over_positions(delta * normalised())) if wanted == "weight" else None


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
) -> OfDelta | None:
    statistics = (None, None) if training else (running_mean, running_var)
    return _by_channel(wanted, lambda: F.batch_norm(input, *statistics, None, None, training, 0.0, eps))


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
) -> OfDelta | None:
    if use_input_stats:
        return _by_channel(wanted, lambda: F.instance_norm(input, eps=eps))
    return _by_channel(wanted, lambda: F.batch_norm(input, running_mean, running_var, eps=eps))


@per_example_rule(F.group_norm)
def _group_norm(
    wanted: str,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> OfDelta | None:
    return _by_channel(wanted, lambda: F.group_norm(input, num_groups, eps=eps))


@per_example_rule(F.layer_norm)
def _layer_norm(
    wanted: str,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> OfDelta | None:
    shape = (weight if wanted == "weight" else bias).shape  # type: ignore[union-attr]
    if input.dim() <= len(shape):  # a single example
        return None
    if wanted == "bias":
        return lambda delta: rows_summed_to(delta, shape)
    return lambda delta: rows_summed_to(delta * F.layer_norm(input, normalized_shape, eps=eps), shape)


@per_example_rule(F.rms_norm)
def _rms_norm(
    wanted: str,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> OfDelta | None:
    if wanted != "weight" or weight is None or input.dim() <= weight.dim():
        return None
    shape = weight.shape
    return lambda delta: rows_summed_to(delta * F.rms_norm(input, normalized_shape, eps=eps), shape)
