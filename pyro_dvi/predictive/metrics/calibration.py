# SPDX-License-Identifier: Apache-2.0
"""Whether probabilities are frequencies."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.core.arguments import check_count
from pyro_dvi.predictive.metrics.checks import classes_and_labels


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
