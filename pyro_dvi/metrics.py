# SPDX-License-Identifier: Apache-2.0
r"""Scores of predictions: how likely, how accurate, how calibrated.

Every function takes what a prediction consists of (probabilities, means, log-likelihoods) and what was observed, as
tensors or anything that ``torch.as_tensor`` accepts, and computes in double precision. Probabilities have their
classes in the last dimension, ``[..., C]`` with labels ``[...]``; where labels are two-valued, probabilities of label
1 alone, of the labels' shape, will do. What cannot be right (NaN, rows that do not sum to one, labels out of range)
raises a :class:`~pyro_dvi.errors.DataError` instead of giving a number.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.errors import ArgumentError, DataError

__all__ = [
    "Estimate",
    "RejectionCurve",
    "ReliabilityTable",
    "accuracy",
    "aumrc",
    "brier",
    "expected_calibration_error",
    "nll",
    "rejection_curve",
    "reliability_table",
    "rmse",
]

SUM_TOLERANCE = 1e-3  # of a row of probabilities; a float16 softmax over 1,000 classes stays below


@dataclass(frozen=True)
class Estimate:
    """A mean over examples with its standard error.

    Attributes:
        value: the mean.
        standard_error: standard deviation over examples divided by the square root of their number; NaN for one.
    """

    value: float
    standard_error: float

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        return f"{self.value:.4f} ± {self.standard_error:.4f}"


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


@dataclass(frozen=True)
class RejectionCurve:
    """How many of the kept predictions are wrong if the most uncertain ones are rejected.

    Attributes:
        rejected: rejected share of the examples, from 0 to 1, shape ``[n + 1]``.
        error: share of the others that is misclassified, shape ``[n + 1]``; 0 where nothing is left.
    """

    rejected: Tensor
    error: Tensor


def nll(log_likelihood: Any) -> Estimate:
    r"""Mean negative log-likelihood, in nats for each example.

    .. math::
        \mathrm{NLL} = -\frac1n \sum_i \log p(y_i \mid x_i), \qquad
        \mathrm{SE} = \sqrt{\frac{1}{n(n-1)} \sum_i (\log p(y_i \mid x_i) + \mathrm{NLL})^2}

    The standard error describes the choice of test examples, not the training run.

    Args:
        log_likelihood: log of the predictive density of each example, any shape, in nats.

    Returns:
        The mean and its standard error.

    Raises:
        DataError: no values, or NaN among them.

    Source: the logarithmic score of Good (1952); Gneiting & Raftery (2007), section 4.

    Example:
        >>> print(nll([-1.0, -2.0, -3.0]))
        2.0000 ± 0.5774
    """
    values = _finite_or_infinite(log_likelihood, "log_likelihood").flatten()
    error = float(values.std() / math.sqrt(len(values))) if len(values) > 1 else math.nan
    return Estimate(float(-values.mean()), error)


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
    p, y = _checked(probabilities, labels)
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
    p, y = _checked(probabilities, labels)
    observed = torch.nn.functional.one_hot(y, p.shape[-1])
    return float((p - observed).square().sum(-1).mean())


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
    if isinstance(num_bins, bool) or not isinstance(num_bins, int) or num_bins < 1:
        raise ArgumentError(f"num_bins must be a positive whole number, not {num_bins!r}")
    p, y = _checked(probabilities, labels)
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
    gap = (
        (table.accuracy - table.confidence).abs().nan_to_num()
    )  # NaN only where the bin is empty: weight zero
    return float((gap * table.count).sum() / table.count.sum())


def rejection_curve(probabilities: Any, labels: Any, uncertainty: Any = None) -> RejectionCurve:
    r"""Misclassification-rejection curve: the error among what is left when uncertain examples are rejected.

    With the examples in the order of rising uncertainty and :math:`e_i` whether example i is misclassified,

    .. math::
        \mathrm{error}\Bigl(\frac kn\Bigr) = \frac{1}{n - k} \sum_{i=1}^{n-k} e_i, \quad k = 0, \dots, n - 1, \qquad
        \mathrm{error}(1) = 0

    Examples of equal uncertainty are rejected in random order, and the curve is the expectation over these orders: each
    of them counts as the mean of their errors. The order of the data therefore does not matter. At the last point
    nothing is left that could be wrong.

    Args:
        probabilities: class probabilities ``[..., C]``, or probabilities of label 1, ``[...]``.
        labels: observed classes ``0..C-1``, shape ``[...]``.
        uncertainty: what to rank by, high values are rejected first, shape ``[...]``; by default the predictive entropy
            :math:`-\sum_c p_{ic} \log p_{ic}`.

    Returns:
        The curve, with a point for each number of rejected examples.

    Raises:
        DataError: probabilities, labels or uncertainties that cannot be right.

    Source: Schmitt & Roth (2021), appendix D; for one measure of uncertainty the risk-coverage curve of El-Yaniv &
    Wiener (2010), read from the other end.

    Example:
        >>> rejection_curve([[0.9, 0.1], [0.6, 0.4]], [0, 1]).error.tolist()
        [0.5, 0.0, 0.0]
    """
    p, y = _checked(probabilities, labels)
    if uncertainty is None:
        ranks = torch.special.entr(p.clamp_min(0)).sum(-1)
    else:
        ranks = _finite_or_infinite(uncertainty, "uncertainty").flatten()
        if len(ranks) != len(y):
            raise DataError(f"uncertainty has {len(ranks)} values for {len(y)} examples: one each is needed")
    _, group, size = ranks.unique(return_inverse=True, return_counts=True)  # groups by rising uncertainty
    wrong = torch.zeros(len(size), dtype=torch.float64).index_add_(0, group, (p.argmax(-1) != y).double())
    errors = (wrong / size).repeat_interleave(size).cumsum(0)  # of the 1, 2, ... n most certain
    kept = torch.arange(1, len(y) + 1, dtype=torch.float64)
    error = torch.cat([(errors / kept).flip(0), torch.zeros(1, dtype=torch.float64)])
    return RejectionCurve(torch.arange(len(error), dtype=torch.float64) / len(y), error)


def aumrc(probabilities: Any, labels: Any, uncertainty: Any = None) -> float:
    r"""Area under the misclassification-rejection curve: low if errors are few and the uncertain ones.

    .. math::
        \mathrm{AUMRC} = \int_0^1 \mathrm{error}(r)\,\mathrm dr

    of the straight lines between the points of :func:`rejection_curve`. For uncertainties that say nothing it is near
    the error of all examples; ranking by who is right gives about half the square of that error.

    Args:
        probabilities: class probabilities ``[..., C]``, or probabilities of label 1, ``[...]``.
        labels: observed classes ``0..C-1``, shape ``[...]``.
        uncertainty: what to rank by, shape ``[...]``; by default the predictive entropy.

    Returns:
        A number between 0 and 1.

    Raises:
        DataError: probabilities, labels or uncertainties that cannot be right.

    Source: Schmitt & Roth (2021), appendix D.

    Example:
        >>> aumrc([[0.9, 0.1], [0.6, 0.4]], [0, 1])
        0.125
    """
    curve = rejection_curve(probabilities, labels, uncertainty)
    return float(torch.trapezoid(curve.error, curve.rejected))


def rmse(mean: Any, observed: Any) -> float:
    r"""Root of the mean squared error of the predicted mean, in units of the observation.

    .. math::
        \sqrt{\frac1n \sum_i (m_i - y_i)^2}

    Args:
        mean: predicted means, any shape.
        observed: observed values of exactly the same shape (``[n]`` against ``[n, 1]`` would broadcast to ``[n, n]``).

    Returns:
        A number in units of ``observed``.

    Raises:
        DataError: shapes that differ, no values, or NaN.

    Example:
        >>> round(rmse([1.0, 2.0], [1.0, 4.0]), 6)
        1.414214
    """
    m, y = _finite_or_infinite(mean, "mean"), _finite_or_infinite(observed, "observed")
    if m.shape != y.shape:
        raise DataError(
            f"mean has shape {tuple(m.shape)} and observed {tuple(y.shape)}: they must be the same"
        )
    return float((m - y).square().mean().sqrt())


def _finite_or_infinite(values: Any, name: str) -> Tensor:
    """Return ``values`` in double precision: at least one, none of them NaN."""
    tensor = torch.as_tensor(values).detach().cpu().double()  # some accelerators have no double precision
    if tensor.numel() == 0:
        raise DataError(f"{name} is empty")
    if tensor.isnan().any():
        raise DataError(f"{name} holds {int(tensor.isnan().sum())} NaN of {tensor.numel()} values")
    return tensor


def _rows_sum_to_one(values: Tensor) -> bool:
    return float((values.sum(-1) - 1).abs().max()) <= SUM_TOLERANCE


def _checked(probabilities: Any, labels: Any) -> tuple[Tensor, Tensor]:
    """Return probabilities ``[n, C]`` in double precision and labels ``[n]`` of whole numbers."""
    p = _finite_or_infinite(probabilities, "probabilities")
    y = _finite_or_infinite(labels, "labels")
    if p.shape == y.shape:  # probabilities of label 1
        if p.dim() > 1 and _rows_sum_to_one(p) and _rows_sum_to_one(y):
            raise DataError("labels are one-hot: pass the class of each example, labels.argmax(-1)")
        p = torch.stack([1 - p, p], -1)
    if p.shape[:-1] != y.shape:
        raise DataError(
            f"probabilities of shape {tuple(p.shape)} need labels of shape {tuple(p.shape[:-1])}, "
            f"not {tuple(y.shape)}: classes are in the last dimension, labels are not one-hot"
        )
    low, high = float(p.min()), float(p.max())
    if low < -SUM_TOLERANCE or high > 1 + SUM_TOLERANCE:
        raise DataError(
            f"probabilities lie between {low:.4g} and {high:.4g}, not 0 and 1: logits need a softmax first"
        )
    if not _rows_sum_to_one(p):
        worst = float((p.sum(-1) - 1).abs().max())
        raise DataError(f"probabilities must sum to one over the last dimension; a row is off by {worst:.4g}")
    whole = y.long()
    num_classes = p.shape[-1]
    if (whole != y).any() or whole.min() < 0 or whole.max() >= num_classes:
        raise DataError(
            f"labels must be whole numbers from 0 to {num_classes - 1}, one for each of the {num_classes} classes; "
            f"found values from {float(y.min()):.6g} to {float(y.max()):.6g}"
        )
    return p.reshape(-1, num_classes), whole.flatten()
