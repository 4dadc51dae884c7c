# SPDX-License-Identifier: Apache-2.0
"""Checks of the scores' arguments: values, class probabilities and labels, converted to double precision."""

from typing import Any

import torch
from torch import Tensor

from pyro_dvi.errors import DataError

SUM_TOLERANCE = 1e-3  # for a row of probabilities; a float16 softmax over 1,000 classes deviates less


def numbers(values: Any, name: str) -> Tensor:
    """Return ``values`` in double precision; they must contain at least one value and no NaN."""
    tensor = torch.as_tensor(values).detach().cpu().double()  # some accelerators have no double precision
    if tensor.numel() == 0:
        raise DataError(f"{name} is empty")
    if tensor.isnan().any():
        raise DataError(f"{int(tensor.isnan().sum())} of the {tensor.numel()} values of {name} are NaN")
    return tensor


def classes_and_labels(probabilities: Any, labels: Any) -> tuple[Tensor, Tensor]:
    """Return probabilities ``[n, C]`` in double precision and integer labels ``[n]``."""
    p, y = numbers(probabilities, "probabilities"), numbers(labels, "labels")
    if p.shape == y.shape:  # probabilities of label 1 alone
        if p.dim() > 1 and all(float((rows.sum(-1) - 1).abs().max()) <= SUM_TOLERANCE for rows in (p, y)):
            raise DataError("labels are one-hot: pass the class index of each example, labels.argmax(-1)")
        p = torch.stack([1 - p, p], -1)
    num_classes = p.shape[-1]
    if p.shape[:-1] != y.shape:
        raise DataError(
            f"probabilities of shape {tuple(p.shape)} need labels of shape {tuple(p.shape[:-1])}, "
            f"not {tuple(y.shape)}: classes must be in the last dimension, and labels must not be one-hot"
        )
    _check_rows(p)
    whole = y.long()
    if (whole != y).any() or whole.min() < 0 or whole.max() >= num_classes:
        raise DataError(
            f"labels must be whole numbers from 0 to {num_classes - 1}; found {float(y.min()):g} to {float(y.max()):g}"
        )
    return p.reshape(-1, num_classes), whole.flatten()


def _check_rows(p: Tensor) -> None:
    low, high = float(p.min()), float(p.max())
    if low < -SUM_TOLERANCE or high > 1 + SUM_TOLERANCE:
        raise DataError(f"probabilities lie between {low:.4g} and {high:.4g}: apply a softmax first")
    worst = float((p.sum(-1) - 1).abs().max())
    if worst > SUM_TOLERANCE:
        raise DataError(
            f"probabilities must sum to one over the last dimension; the sum of a row differs by {worst:.4g}"
        )


def alike(**given: Any) -> tuple[Tensor, ...]:
    """Return the values in double precision; their shapes must be equal."""
    values = {name: numbers(value, name) for name, value in given.items()}
    if len({value.shape for value in values.values()}) > 1:
        shapes = " and ".join(f"{name} has shape {tuple(value.shape)}" for name, value in values.items())
        raise DataError(f"{shapes}: the shapes must be equal")
    return tuple(values.values())
