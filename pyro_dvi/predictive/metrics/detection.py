# SPDX-License-Identifier: Apache-2.0
"""Whether strange inputs are noticed: uncertainty of familiar against that of foreign examples."""

import math
from typing import Any

import torch

from pyro_dvi.errors import ArgumentError
from pyro_dvi.predictive.metrics.checks import numbers


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
