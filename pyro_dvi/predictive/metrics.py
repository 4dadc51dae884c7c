# SPDX-License-Identifier: Apache-2.0
r"""Scores of predictions: likelihood, accuracy, calibration, selective prediction, out-of-distribution detection.

Every function takes parts of a prediction (probabilities, means, log-likelihoods) and the observed values, as tensors
or anything that ``torch.as_tensor`` accepts, and computes in double precision. Class probabilities have shape
``[..., C]``, with classes in the last dimension, and labels ``0..C-1`` have shape ``[...]``. For two classes, the
probabilities of label 1 are sufficient, in the shape of the labels. Invalid values (NaN, rows that do not sum to one,
labels out of range, unequal shapes) raise a :class:`~pyro_dvi.errors.DataError`.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.core.arguments import check_count
from pyro_dvi.errors import DataError
from pyro_dvi.expectations.closed_forms import mean_distance
from pyro_dvi.predictive.metric_arguments import alike, classes_and_labels, numbers

__all__ = [
    "Estimate",
    "accuracy",
    "aumrc",
    "auroc",
    "brier",
    "coverage",
    "crps_gaussian",
    "expected_calibration_error",
    "fpr_at_tpr",
    "misclassification_auroc",
    "nll",
    "rejection_curve",
    "reliability_table",
    "rmse",
]


def accuracy(probabilities: Any, labels: Any) -> float:
    r"""Fraction of examples whose most probable class is the observed class.

    .. math::
        \frac1n \sum_i 1[\arg\max_c p_{ic} = y_i]

    Example:
        >>> accuracy([[0.9, 0.1], [0.4, 0.6]], [0, 0])
        0.5
    """
    p, y = classes_and_labels(probabilities, labels)
    return float((p.argmax(-1) == y).double().mean())


def brier(probabilities: Any, labels: Any) -> float:
    r"""Brier score, summed over classes: 0 for perfect predictions, 2 if all are wrong with full confidence.

    .. math::
        \frac1n \sum_i \sum_c (p_{ic} - 1[y_i = c])^2

    For two classes, this score is twice the mean squared error of the probability of label 1; some libraries report
    that error as the Brier score.

    Source: Brier (1950), Eq. 2.

    Example:
        >>> round(brier([[0.9, 0.1], [0.4, 0.6]], [0, 0]), 6)
        0.37
    """
    p, y = classes_and_labels(probabilities, labels)
    observed = torch.nn.functional.one_hot(y, p.shape[-1])
    return float((p - observed).square().sum(-1).mean())


@dataclass(frozen=True)
class ReliabilityTable:
    """Confidence and accuracy in bins of confidence: the data of a reliability diagram.

    Attributes:
        edges: limits of the bins, shape ``[B + 1]``; bin ``b`` contains confidences in ``(edges[b], edges[b + 1]]``.
        confidence: mean confidence in each bin, shape ``[B]``; NaN if the bin is empty.
        accuracy: fraction of correct predictions in each bin, shape ``[B]``; NaN if the bin is empty.
        count: number of examples in each bin, shape ``[B]``.
    """

    edges: Tensor
    confidence: Tensor
    accuracy: Tensor
    count: Tensor


def reliability_table(probabilities: Any, labels: Any, num_bins: int = 15) -> ReliabilityTable:
    r"""Mean confidence :math:`\max_c p_{ic}` and accuracy, in equally wide bins :math:`((b-1)/B,\, b/B]` of confidence.

    Source: DeGroot & Fienberg (1983); bins as in Guo et al. (2017), section 2.

    Example:
        >>> table = reliability_table([[0.9, 0.1], [0.4, 0.6]], [0, 0], num_bins=2)
        >>> table.count.tolist(), table.accuracy.tolist()
        ([0, 2], [nan, 0.5])
    """
    check_count("num_bins", num_bins)
    p, y = classes_and_labels(probabilities, labels)
    confidence, predicted = p.max(-1)
    # Dividing integers gives the same edges on every machine, so that a confidence on an edge always has the same bin.
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

    over the equally wide, right-closed bins of :func:`reliability_table`. The ECE depends on the number of bins, and is
    biased upwards if there are few examples. Compare values only if they were computed from the same data with the same
    bins.

    Source: Naeini et al. (2015); Guo et al. (2017), Eq. 3.

    Example:
        >>> round(expected_calibration_error([[0.9, 0.1], [0.4, 0.6]], [0, 0], num_bins=2), 6)
        0.25
    """
    table = reliability_table(probabilities, labels, num_bins)
    # NaN occurs only in empty bins, which have weight zero.
    gap = (table.accuracy - table.confidence).abs().nan_to_num()
    return float((gap * table.count).sum() / table.count.sum())


@dataclass(frozen=True)
class RejectionCurve:
    """The ``rejected`` fraction of examples and the ``error`` of the others (0 if there are none), both ``[n + 1]``."""

    rejected: Tensor
    error: Tensor


def rejection_curve(probabilities: Any, labels: Any, uncertainty: Any = None) -> RejectionCurve:
    r"""Misclassification-rejection curve: the error of the remaining examples when uncertain ones are rejected.

    With examples in order of increasing uncertainty, and :math:`e_i = 1` if example i is misclassified and 0 otherwise,

    .. math::
        \mathrm{error}\Bigl(\frac kn\Bigr) = \frac{1}{n - k} \sum_{i=1}^{n-k} e_i, \quad k = 0, \dots, n - 1, \qquad
        \mathrm{error}(1) = 0

    For examples of equal uncertainty, each :math:`e_i` is replaced by the mean over these examples, which is its
    expectation if their order is random.

    Args:
        probabilities: class probabilities.
        labels: observed classes.
        uncertainty: values ``[...]`` that rank the examples; the highest are rejected first. By default, the predictive
            entropy.

    Source: Schmitt & Roth (2021), appendix D; equivalent to the risk-coverage curve of El-Yaniv & Wiener (2010), with
    coverage = 1 - rejected.

    Example:
        >>> rejection_curve([[0.9, 0.1], [0.6, 0.4]], [0, 1]).error.tolist()
        [0.5, 0.0, 0.0]
    """
    p, y = classes_and_labels(probabilities, labels)
    if uncertainty is None:
        ranks = torch.special.entr(p.clamp_min(0)).sum(-1)
    else:
        ranks = _one_each(uncertainty, y)
    # Groups, by increasing uncertainty.
    _, group, size = ranks.unique(return_inverse=True, return_counts=True)
    wrong = torch.zeros(len(size), dtype=torch.float64).index_add_(0, group, (p.argmax(-1) != y).double())
    # Errors among the 1, 2, ... n most certain examples.
    errors = (wrong / size).repeat_interleave(size).cumsum(0)
    kept = torch.arange(1, len(y) + 1, dtype=torch.float64)
    error = torch.cat([(errors / kept).flip(0), torch.zeros(1, dtype=torch.float64)])
    return RejectionCurve(torch.arange(len(error), dtype=torch.float64) / len(y), error)


def aumrc(probabilities: Any, labels: Any, uncertainty: Any = None) -> float:
    r"""Area under the misclassification-rejection curve; low if errors are few and have a high uncertainty.

    The area under the step function is the mean error over all numbers of kept examples,

    .. math::
        \mathrm{AUMRC} = \frac1n \sum_{k=0}^{n-1} \mathrm{error}\Bigl(\frac kn\Bigr)
            = \frac1n \sum_{k=1}^{n} \frac1k \sum_{i=1}^{k} e_i,

    with the arguments, the curve and the :math:`e_i` of :func:`rejection_curve`. The AUMRC equals the area under the
    risk-coverage curve (AURC). If the uncertainties are uninformative, it is about the error rate of all examples; if
    their ranking is perfect, it is about half the square of this error rate.

    Source: Nadeem, Zucker & Hanczar (2009) for the curve; Schmitt & Roth (2021), appendix D; under the name AURC,
    Geifman, Uziel & El-Yaniv (2019), section 2.

    Example:
        >>> aumrc([[0.9, 0.1], [0.6, 0.4]], [0, 1])
        0.25
    """
    return float(rejection_curve(probabilities, labels, uncertainty).error[:-1].mean())


def auroc(inside: Any, outside: Any) -> float:
    r"""Probability that an out-of-distribution example is more uncertain than an in-distribution one; 0.5 is chance.

    .. math::
        \mathrm{AUROC} = \frac1{nm} \sum_{i,j} \Bigl(1[u_i < v_j] + \tfrac12 1[u_i = v_j]\Bigr)

    Args:
        inside: uncertainty u (such as the predictive entropy) of n examples from the distribution of the training data.
        outside: uncertainty v of m out-of-distribution examples.

    Source: Mann & Whitney (1947); for out-of-distribution detection, Hendrycks & Gimpel (2017).

    Example:
        >>> auroc([0.1, 0.2, 0.3], [0.3, 0.9])
        0.9166666666666666
    """
    u, v = numbers(inside, "inside").flatten(), numbers(outside, "outside").flatten()
    ordered = u.sort().values
    below = torch.searchsorted(ordered, v, right=False).double()
    not_above = torch.searchsorted(ordered, v, right=True).double()
    return float((0.5 * (below + not_above)).mean() / len(u))


def fpr_at_tpr(inside: Any, outside: Any, tpr: float = 0.95) -> float:
    r"""False-positive rate: fraction of out-of-distribution examples that are accepted as in-distribution.

    .. math::
        \frac1m \sum_j 1[v_j \le t], \qquad t = \min\Bigl\{u_i : \frac1n \sum_k 1[u_k \le u_i] \ge
        \mathrm{TPR}\Bigr\}

    An example is accepted if its uncertainty is at most the threshold t. In-distribution examples are the positives.
    Lower rates are better.

    Args:
        inside: uncertainty u of n in-distribution examples.
        outside: uncertainty v of m out-of-distribution examples.
        tpr: true-positive rate, the fraction of in-distribution examples at or below the threshold t. It must be above
            0 and at most 1.

    Source: Liang, Li & Srikant (2018), section 4.

    Example:
        >>> fpr_at_tpr([0.1, 0.2, 0.3], [0.25, 0.9], tpr=0.6)
        0.0
    """
    u, v = numbers(inside, "inside").flatten(), numbers(outside, "outside").flatten()
    passing = math.ceil(len(u) * (tpr - 1e-12))  # 0.95 of 20 is 19, whatever the rounding
    return float((v <= u.kthvalue(max(1, passing)).values).double().mean())


def misclassification_auroc(probabilities: Any, labels: Any, uncertainty: Any = None) -> float:
    r"""Probability that a wrong prediction is more uncertain than a right one; 0.5 is chance.

    It is :func:`auroc` with right predictions in place of in-distribution examples and wrong predictions in place of
    out-of-distribution examples. Each method is judged by its own errors, so only methods with about the same accuracy
    can be compared.

    Args:
        probabilities: class probabilities.
        labels: observed classes.
        uncertainty: values ``[...]`` that rank the examples; by default one minus the confidence,
            :math:`1 - \max_c p_{ic}`.

    Raises:
        DataError: if all predictions are right, or all are wrong.

    Source: Hendrycks & Gimpel (2017), section 3; Osawa et al. (2019), Table 1.

    Example:
        >>> misclassification_auroc([[0.9, 0.1], [0.6, 0.4], [0.3, 0.7]], [0, 1, 1])
        1.0
    """
    p, y = classes_and_labels(probabilities, labels)
    ranks = 1 - p.amax(-1) if uncertainty is None else _one_each(uncertainty, y)
    wrong = p.argmax(-1) != y
    if wrong.all() or not wrong.any():
        raise DataError(
            f"all predictions are {'wrong' if wrong.any() else 'right'}: the AUROC needs right and wrong ones"
        )
    return auroc(ranks[~wrong], ranks[wrong])


def _one_each(uncertainty: Any, labels: Tensor) -> Tensor:
    """Return the uncertainty of each example, as one dimension."""
    ranks = numbers(uncertainty, "uncertainty").flatten()
    if len(ranks) != len(labels):
        raise DataError(f"uncertainty has {len(ranks)} values for {len(labels)} examples: pass one for each")
    return ranks


@dataclass(frozen=True)
class Estimate:
    """A mean over examples, and its standard error (NaN for a single example)."""

    value: float
    standard_error: float

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        return f"{self.value:.4f} ± {self.standard_error:.4f}"


def nll(log_likelihood: Any) -> Estimate:
    r"""Mean negative log-likelihood, in nats per example.

    .. math::
        \mathrm{NLL} = -\frac1n \sum_i \log p(y_i \mid x_i), \qquad
        \mathrm{SE} = \sqrt{\frac{1}{n(n-1)} \sum_i (\log p(y_i \mid x_i) + \mathrm{NLL})^2}

    The standard error measures the variation due to the choice of test examples, not the variation between training
    runs.

    Source: the logarithmic score of Good (1952); Gneiting & Raftery (2007), section 4.

    Example:
        >>> print(nll([-1.0, -2.0, -3.0]))
        2.0000 ± 0.5774
    """
    values = numbers(log_likelihood, "log_likelihood").flatten()
    error = float(values.std() / math.sqrt(len(values))) if len(values) > 1 else math.nan
    return Estimate(float(-values.mean()), error)


def rmse(mean: Any, observed: Any) -> float:
    """Root mean squared error of the predicted mean, in units of the observation.

    Example:
        >>> round(rmse([1.0, 2.0], [1.0, 4.0]), 6)
        1.414214
    """
    m, y = alike(mean=mean, observed=observed)
    return float((m - y).square().mean().sqrt())


def coverage(lower: Any, upper: Any, observed: Any) -> float:
    """Prediction interval coverage probability (PICP): the fraction of observations inside their closed intervals.

    Calibrated 95 % intervals contain 95 % of new observations, up to a binomial standard error.

    Source: Khosravi et al. (2011), Eq. 8.

    Example:
        >>> coverage([0.0, 0.0], [1.0, 1.0], [0.5, 2.0])
        0.5
    """
    low, high, y = alike(lower=lower, upper=upper, observed=observed)
    if (low > high).any():
        raise DataError(f"{int((low > high).sum())} of {low.numel()} lower limits exceed their upper limits")
    return float(((low <= y) & (y <= high)).double().mean())


def crps_gaussian(mean: Any, scale: Any, observed: Any) -> float:
    r"""Continuous ranked probability score of Gaussian predictions, in units of the observation; 0 is perfect.

    .. math::
        \mathrm{CRPS} = \frac1n \sum_i \sigma_i \Bigl[z_i (2\Phi(z_i) - 1) + 2\phi(z_i) - \tfrac1{\sqrt\pi}\Bigr],
        \qquad z_i = \frac{y_i - m_i}{\sigma_i}

    Status: exact. For a scale of zero, the score is the absolute error, which is its limit as the scale tends to zero.

    Source: Gneiting & Raftery (2007), section 4.2, with the opposite sign.

    Example:
        >>> round(crps_gaussian([0.0], [1.0], [0.0]), 6)
        0.233695
    """
    m, s, y = alike(mean=mean, scale=scale, observed=observed)
    if s.min() < 0:
        raise DataError(
            f"scale is a standard deviation and must not be negative; its minimum is {float(s.min()):.6g}"
        )
    return float((mean_distance(y - m, s) - s / math.sqrt(math.pi)).mean())
