# SPDX-License-Identifier: Apache-2.0
"""Inputs of the model as constant data, by the names that the model gives them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.inference_data.arrays import as_array, joined
from pyro_dvi.inference_data.group import Group
from pyro_dvi.signatures import parameter_names

__all__ = ["MAX_INPUT_VALUES", "constant_data"]

MAX_INPUT_VALUES = 1_000_000  # inputs with more values are not copied


def constant_data(
    model: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], rows: str | None
) -> tuple[Group, list[str]]:
    """Join the inputs of all batches.

    Args:
        model: the Pyro model.
        inputs: its arguments in every batch; nested ones are named by their path, ``image.left``.
        rows: name of the dimension of examples, if known.

    Returns:
        The group, and the names of inputs that are too big to copy.
    """
    names = parameter_names(model, len(inputs[0]))
    pieces: dict[str, list[Tensor]] = {}
    for arguments in inputs:
        for name, argument in zip(names, arguments, strict=False):
            for path, tensor in _tensors(name, argument):
                pieces.setdefault(path, []).append(tensor)
    group, left_out = Group(sampled=False), []
    for path, tensors in pieces.items():
        if sum(t.numel() for t in tensors) > MAX_INPUT_VALUES:
            left_out.append(path)
        elif len(tensors) == len(inputs):
            group.add(path, joined([as_array(t) for t in tensors], 0), [rows])
    return group, left_out


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if torch.is_tensor(value):
        if value.dim() > 0:
            yield name, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _tensors(f"{name}.{key}", part)
    elif isinstance(value, (tuple, list)):
        for i, part in enumerate(value):
            yield from _tensors(f"{name}.{i}", part)
