# SPDX-License-Identifier: Apache-2.0
"""How uncertain predicted classes are, and what of it more data could remove."""

from typing import Any

import torch
from torch import Tensor

from pyro_dvi.errors import DataError
from pyro_dvi.predictive.metrics.checks import probability_rows


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


def mutual_information(probabilities: Any) -> Tensor:
    r"""Mutual information between class and posterior draw, in nats: the uncertainty that more data could remove.

    .. math::
        I = H\Bigl(\frac1S \sum_s p_s\Bigr) - \frac1S \sum_s H(p_s)

    Args:
        probabilities: class probabilities of S draws, ``[S, ..., C]``.

    Returns:
        Shape ``[...]``, not negative.

    Raises:
        DataError: rows that are no probabilities, or no dimension of draws.

    Source: Houlsby et al. (2011), Eq. 2; Depeweg et al. (2018), Eq. 5.

    Example:
        >>> mutual_information([[[1.0, 0.0]], [[0.0, 1.0]]])
        tensor([0.6931], dtype=torch.float64)
    """
    p = probability_rows(probabilities)
    if p.dim() < 2:
        raise DataError(
            f"probabilities of shape {tuple(p.shape)} have no dimension of draws: [S, ..., C] is needed"
        )
    return (predictive_entropy(p.mean(0)) - predictive_entropy(p).mean(0)).clamp_min(0)
