# SPDX-License-Identifier: Apache-2.0
"""How right the classes are."""

from typing import Any

import torch

from pyro_dvi.predictive.metrics.checks import classes_and_labels


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
