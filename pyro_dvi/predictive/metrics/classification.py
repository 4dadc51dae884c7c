# SPDX-License-Identifier: Apache-2.0
"""Scores of class probabilities: accuracy, Brier score, entropy and calibration, and checks of their arguments."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.core.arguments import check_count
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


def accuracy(probabilities: Any, labels: Any) -> float:
    r"""Share of examples whose most probable class is the observed one.

    .. math::
        \frac1n \sum_i 1[\arg\max_c p_{ic} = y_i]

    Of equally probable classes the first counts as predicted.

    Args:
        probabilities: class probabilities ``[..., C]``, or probabilities of label 1, ``[...]``.
        labels: observed classes ``0..C-1``, shape ``[...]``.

    Returns:
        A number between 0 and 1.

    Raises:
        DataError: probabilities or labels that cannot be right.

    Example:
        >>> accuracy([[0.9, 0.1], [0.4, 0.6]], [0, 0])
        0.5
    """
    p, y = classes_and_labels(probabilities, labels)
    return float((p.argmax(-1) == y).double().mean())


def brier(probabilities: Any, labels: Any) -> float:
    r"""Brier score, summed over classes: 0 is perfect, 2 is certain and wrong.

    .. math::
        \frac1n \sum_i \sum_c (p_{ic} - 1[y_i = c])^2

    For two classes this is twice the mean squared error of the probability of label 1, which some libraries report.

    Args:
        probabilities: class probabilities ``[..., C]``, or probabilities of label 1, ``[...]``.
        labels: observed classes ``0..C-1``, shape ``[...]``.

    Returns:
        A number between 0 and 2.

    Raises:
        DataError: probabilities or labels that cannot be right.

    Source: Brier (1950), Eq. 2.

    Example:
        >>> round(brier([[0.9, 0.1], [0.4, 0.6]], [0, 0]), 6)
        0.37
    """
    p, y = classes_and_labels(probabilities, labels)
    observed = torch.nn.functional.one_hot(y, p.shape[-1])
    return float((p - observed).square().sum(-1).mean())


def predictive_entropy(probabilities: Any) -> Tensor:
    r"""Entropy of each row of class probabilities, in nats: the whole uncertainty.

    .. math::
        H(p) = -\sum_c p_c \log p_c

    Args:
        probabilities: class probabilities ``[..., C]``.

    Returns:
        Shape ``[...]``, between 0 and log C.

    Raises:
        DataError: rows that are no probabilities.

    Example:
        >>> predictive_entropy([[0.5, 0.5], [1.0, 0.0]])
        tensor([0.6931, 0.0000], dtype=torch.float64)
    """
    return torch.special.entr(probability_rows(probabilities).clamp_min(0)).sum(-1)


@dataclass(frozen=True)
class ReliabilityTable:
    """What a reliability diagram shows: confidence against accuracy, by bins of confidence.

    Attributes:
        edges: limits of the bins, shape ``[B + 1]``; bin ``b`` holds confidences in ``(edges[b], edges[b + 1]]``.
        confidence: mean confidence in each bin, shape ``[B]``; NaN where the bin is empty.
        accuracy: share of right labels in each bin, shape ``[B]``; NaN where the bin is empty.
        count: examples in each bin, shape ``[B]``.
    """

    edges: Tensor
    confidence: Tensor
    accuracy: Tensor
    count: Tensor


def reliability_table(probabilities: Any, labels: Any, num_bins: int = 15) -> ReliabilityTable:
    r"""Mean confidence and accuracy in equally wide bins of confidence.

    Confidence is the probability of the predicted class, :math:`\max_c p_{ic}`. Bin :math:`b` of :math:`B` holds the
    confidences in :math:`((b-1)/B,\, b/B]`.

    Args:
        probabilities: class probabilities ``[..., C]``, or probabilities of label 1, ``[...]``.
        labels: observed classes ``0..C-1``, shape ``[...]``.
        num_bins: number :math:`B` of bins between 0 and 1.

    Returns:
        The table; empty bins have a count of 0 and NaN elsewhere.

    Raises:
        ArgumentError: less than one bin.
        DataError: probabilities or labels that cannot be right.

    Source: DeGroot & Fienberg (1983); bins as in Guo et al. (2017), section 2.

    Example:
        >>> table = reliability_table([[0.9, 0.1], [0.4, 0.6]], [0, 0], num_bins=2)
        >>> table.count.tolist(), table.accuracy.tolist()
        ([0, 2], [nan, 0.5])
    """
    check_count("num_bins", num_bins)
    p, y = classes_and_labels(probabilities, labels)
    confidence, predicted = p.max(-1)
    # Dividing whole numbers gives the same edges everywhere, so that a confidence on an edge has one place.
    edges = torch.arange(num_bins + 1, dtype=torch.float64) / num_bins
    place = torch.bucketize(confidence, edges[1:-1])

    def total(values: Tensor) -> Tensor:
        return torch.zeros(num_bins, dtype=torch.float64).index_add_(0, place, values.double())

    count = total(torch.ones_like(confidence))
    return ReliabilityTable(edges, total(confidence) / count, total(predicted == y) / count, count.long())


def expected_calibration_error(probabilities: Any, labels: Any, num_bins: int = 15) -> float:
    r"""Expected calibration error: the mean gap between confidence and accuracy.

    .. math::
        \mathrm{ECE} = \sum_b \frac{n_b}{n} \bigl|\mathrm{accuracy}_b - \mathrm{confidence}_b\bigr|

    over the equally wide, right-closed bins of :func:`reliability_table`. It depends on their number and is biased
    upwards for few examples: compare only values of the same data and bins.

    Args:
        probabilities: class probabilities ``[..., C]``, or probabilities of label 1, ``[...]``.
        labels: observed classes ``0..C-1``, shape ``[...]``.
        num_bins: number of bins between 0 and 1; 15 and 20 are common.

    Returns:
        A number between 0 and 1.

    Raises:
        ArgumentError: less than one bin.
        DataError: probabilities or labels that cannot be right.

    Source: Naeini et al. (2015); Guo et al. (2017), Eq. 3.

    Example:
        >>> round(expected_calibration_error([[0.9, 0.1], [0.4, 0.6]], [0, 0], num_bins=2), 6)
        0.25
    """
    table = reliability_table(probabilities, labels, num_bins)
    # NaN only where the bin is empty: weight zero.
    gap = (table.accuracy - table.confidence).abs().nan_to_num()
    return float((gap * table.count).sum() / table.count.sum())


def adaptive_calibration_error(probabilities: Any, labels: Any, num_bins: int = 15) -> float:
    r"""Calibration error over bins of equally many examples.

    .. math::
        \mathrm{AECE} = \sum_b \frac{n_b}{n} \bigl|\mathrm{accuracy}_b - \mathrm{confidence}_b\bigr|, \qquad
        n_b \in \{\lfloor n/B \rfloor, \lceil n/B \rceil\}

    with the examples in the order of their confidence; the first bins take the examples that are left over. Examples
    of equal confidence count as the mean of their hits, so that the order of the data does not matter.

    Args:
        probabilities: class probabilities ``[..., C]``, or probabilities of label 1, ``[...]``.
        labels: observed classes ``0..C-1``, shape ``[...]``.
        num_bins: number B of bins; with more bins than examples, one example a bin.

    Returns:
        A number between 0 and 1.

    Raises:
        ArgumentError: less than one bin.
        DataError: probabilities or labels that cannot be right.

    Source: Nguyen & O'Connor (2015), section 3; Nixon et al. (2019), Eq. 3, for the predicted class.

    Example:
        >>> round(adaptive_calibration_error([[0.9, 0.1], [0.4, 0.6]], [0, 0], num_bins=2), 6)
        0.35
    """
    check_count("num_bins", num_bins)
    p, y = classes_and_labels(probabilities, labels)
    confidence, predicted = p.max(-1)
    levels, group, size = confidence.unique(return_inverse=True, return_counts=True)
    hits = torch.zeros(len(size), dtype=torch.float64).index_add_(0, group, (predicted == y).double())
    gaps = (levels - hits / size).repeat_interleave(size)
    return float(sum(part.sum().abs() for part in torch.tensor_split(gaps, num_bins)) / len(y))
