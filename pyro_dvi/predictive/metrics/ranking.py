# SPDX-License-Identifier: Apache-2.0
"""Scores of uncertainties that rank examples: rejection curves, and detection of out-of-distribution examples."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_dvi.errors import ArgumentError, DataError
from pyro_dvi.predictive.metrics.classification import classes_and_labels, numbers


@dataclass(frozen=True)
class RejectionCurve:
    """How many of the kept predictions are wrong if the most uncertain ones are rejected.

    Attributes:
        rejected: rejected share of the examples, from 0 to 1, shape ``[n + 1]``.
        error: share of the others that is misclassified, shape ``[n + 1]``; 0 where nothing is left.
    """

    rejected: Tensor
    error: Tensor


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
    p, y = classes_and_labels(probabilities, labels)
    if uncertainty is None:
        ranks = torch.special.entr(p.clamp_min(0)).sum(-1)
    else:
        ranks = numbers(uncertainty, "uncertainty").flatten()
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

    The area of steps, which is the mean error over all numbers of kept examples,

    .. math::
        \mathrm{AUMRC} = \frac1n \sum_{k=0}^{n-1} \mathrm{error}\Bigl(\frac kn\Bigr)
            = \frac1n \sum_{k=1}^{n} \frac1k \sum_{i=1}^{k} e_i,

    with the curve and the :math:`e_i` of :func:`rejection_curve`. Read from the other end it is the area under the
    risk-coverage curve, AURC.
    For uncertainties that say nothing it is near the error of all examples; ranking by who is right gives about half
    the square of that error.

    Args:
        probabilities: class probabilities ``[..., C]``, or probabilities of label 1, ``[...]``.
        labels: observed classes ``0..C-1``, shape ``[...]``.
        uncertainty: what to rank by, shape ``[...]``; by default the predictive entropy.

    Returns:
        A number between 0 and 1.

    Raises:
        DataError: probabilities, labels or uncertainties that cannot be right.

    Source: Nadeem, Zucker & Hanczar (2009) for the curve; Schmitt & Roth (2021), appendix D; as AURC Geifman, Uziel &
    El-Yaniv (2019), section 2.

    Example:
        >>> aumrc([[0.9, 0.1], [0.6, 0.4]], [0, 1])
        0.25
    """
    return float(rejection_curve(probabilities, labels, uncertainty).error[:-1].mean())


def error_at_rejection(probabilities: Any, labels: Any, rejected: float, uncertainty: Any = None) -> float:
    r"""Share of misclassified examples when the most uncertain ones are rejected.

    The value of :func:`rejection_curve` at the rejected share, on the straight line between its points.

    Args:
        probabilities: class probabilities ``[..., C]``, or probabilities of label 1, ``[...]``.
        labels: observed classes ``0..C-1``, shape ``[...]``.
        rejected: share of the examples, from 0 to 1; 0.1, 0.25 and 0.5 are usual.
        uncertainty: what to rank by, shape ``[...]``; by default the predictive entropy.

    Returns:
        A number between 0 and 1.

    Raises:
        ArgumentError: a share outside of [0, 1].
        DataError: probabilities, labels or uncertainties that cannot be right.

    Source: Schmitt & Roth (2021), appendix D.

    Example:
        >>> error_at_rejection([[0.9, 0.1], [0.6, 0.4]], [0, 1], rejected=0.25)
        0.25
    """
    if not 0 <= rejected <= 1:
        raise ArgumentError(f"rejected is a share of the examples between 0 and 1, got {rejected!r}")
    curve = rejection_curve(probabilities, labels, uncertainty)
    return float(np.interp(rejected, curve.rejected.numpy(), curve.error.numpy()))


def auroc(inside: Any, outside: Any) -> float:
    r"""Probability that a foreign example is more uncertain than a familiar one; 0.5 is chance.

    .. math::
        \mathrm{AUROC} = \frac1{nm} \sum_{i,j} \Bigl(1[u_i < v_j] + \tfrac12 1[u_i = v_j]\Bigr)

    Args:
        inside: uncertainty u of n examples from the distribution of the training data, such as the predictive entropy.
        outside: uncertainty v of m examples from another one.

    Returns:
        A number between 0 and 1.

    Raises:
        DataError: no values, or NaN.

    Source: Mann & Whitney (1947); Hendrycks & Gimpel (2017) for the use.

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
    r"""Share of foreign examples that pass as familiar at a threshold that most familiar ones pass.

    .. math::
        \frac1m \sum_j 1[v_j \le t], \qquad t = \min\Bigl\{u_i : \frac1n \sum_k 1[u_k \le u_i] \ge
        \mathrm{TPR}\Bigr\}

    Familiar examples are the positives. At ties the foreign example passes, as the familiar one does.

    Args:
        inside: uncertainty u of n familiar examples.
        outside: uncertainty v of m foreign ones.
        tpr: share of familiar examples that have to pass.

    Returns:
        A number between 0 and 1; low is good.

    Raises:
        ArgumentError: a share outside of (0, 1].
        DataError: no values, or NaN.

    Source: Liang, Li & Srikant (2018), section 4.

    Example:
        >>> fpr_at_tpr([0.1, 0.2, 0.3], [0.25, 0.9], tpr=0.6)
        0.0
    """
    if not 0 < tpr <= 1:
        raise ArgumentError(f"tpr is a share above 0 and at most 1, got {tpr!r}")
    u, v = numbers(inside, "inside").flatten(), numbers(outside, "outside").flatten()
    passing = math.ceil(len(u) * (tpr - 1e-12))  # 0.95 of 20 is 19, whatever the rounding
    return float((v <= u.kthvalue(max(1, passing)).values).double().mean())
