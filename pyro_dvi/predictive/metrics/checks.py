# SPDX-License-Identifier: Apache-2.0
"""What scores are given: in double precision, and checked."""

from typing import Any

import torch
from torch import Tensor

from pyro_dvi.errors import DataError

SUM_TOLERANCE = 1e-3  # of a row of probabilities; a float16 softmax over 1,000 classes stays below


def numbers(values: Any, name: str) -> Tensor:
    """Return ``values`` in double precision: at least one, none of them NaN."""
    tensor = torch.as_tensor(values).detach().cpu().double()  # some accelerators have no double precision
    if tensor.numel() == 0:
        raise DataError(f"{name} is empty")
    if tensor.isnan().any():
        raise DataError(f"{name} holds {int(tensor.isnan().sum())} NaN of {tensor.numel()} values")
    return tensor


def _rows_sum_to_one(values: Tensor) -> bool:
    return float((values.sum(-1) - 1).abs().max()) <= SUM_TOLERANCE


def classes_and_labels(probabilities: Any, labels: Any) -> tuple[Tensor, Tensor]:
    """Return probabilities ``[n, C]`` in double precision and labels ``[n]`` of whole numbers."""
    p = numbers(probabilities, "probabilities")
    y = numbers(labels, "labels")
    if p.shape == y.shape:  # probabilities of label 1
        if p.dim() > 1 and _rows_sum_to_one(p) and _rows_sum_to_one(y):
            raise DataError("labels are one-hot: pass the class of each example, labels.argmax(-1)")
        p = torch.stack([1 - p, p], -1)
    if p.shape[:-1] != y.shape:
        raise DataError(
            f"probabilities of shape {tuple(p.shape)} need labels of shape {tuple(p.shape[:-1])}, "
            f"not {tuple(y.shape)}: classes are in the last dimension, labels are not one-hot"
        )
    _check_rows(p)
    whole = y.long()
    num_classes = p.shape[-1]
    if (whole != y).any() or whole.min() < 0 or whole.max() >= num_classes:
        raise DataError(
            f"labels must be whole numbers from 0 to {num_classes - 1}, one for each of the {num_classes} classes; "
            f"found values from {float(y.min()):.6g} to {float(y.max()):.6g}"
        )
    return p.reshape(-1, num_classes), whole.flatten()


def probability_rows(probabilities: Any) -> Tensor:
    """Return class probabilities ``[..., C]`` in double precision."""
    p = numbers(probabilities, "probabilities")
    if p.dim() == 0:
        raise DataError("probabilities is a single number: rows over the classes are needed, [..., C]")
    _check_rows(p)
    return p


def _check_rows(p: Tensor) -> None:
    low, high = float(p.min()), float(p.max())
    if low < -SUM_TOLERANCE or high > 1 + SUM_TOLERANCE:
        raise DataError(
            f"probabilities lie between {low:.4g} and {high:.4g}, not 0 and 1: logits need a softmax first"
        )
    if not _rows_sum_to_one(p):
        worst = float((p.sum(-1) - 1).abs().max())
        raise DataError(f"probabilities must sum to one over the last dimension; a row is off by {worst:.4g}")
