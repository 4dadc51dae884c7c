# SPDX-License-Identifier: Apache-2.0
"""Summaries of a set of observations, for checks of a model against its data."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributions as td

from pyro_dvi.core.distributions import innermost
from pyro_dvi.errors import ArgumentError

Statistic = Callable[[Tensor], Any]

MANY_CLASSES = 10  # above which single classes are not followed


def default_statistics(fn: Any) -> dict[str, Statistic]:
    """Return what is worth a look in observations of a distribution.

    Numbers have their mean, standard deviation, minimum and maximum; classes the share of each (up to ten), the largest
    share, and how many occur; labels 0 and 1 the share of 1.

    Args:
        fn: the observed distribution.
    """
    base = innermost(fn)
    if isinstance(base, td.Bernoulli):
        return {"share of 1": lambda y: y.double().mean()}
    if isinstance(base, td.Categorical | td.OneHotCategorical):
        one_hot = isinstance(base, td.OneHotCategorical)
        num_classes = base.probs.shape[-1]

        def shares(y: Tensor) -> Tensor:
            labels = y.argmax(-1) if one_hot else y
            counts = torch.bincount(labels.long().flatten(), minlength=num_classes)
            return counts.double() / counts.sum()

        def share(k: int, y: Tensor) -> Tensor:
            return shares(y)[k]

        followed = range(num_classes if num_classes <= MANY_CLASSES else 0)
        return {
            **{f"share of class {k}": partial(share, k) for k in followed},
            "largest share": lambda y: shares(y).max(),
            "classes seen": lambda y: (shares(y) > 0).sum(),
        }
    return {
        "mean": lambda y: y.double().mean(),
        "sd": lambda y: y.double().std(correction=0),
        "min": lambda y: y.min(),
        "max": lambda y: y.max(),
    }


def applied(statistics: Mapping[str, Statistic], y: Tensor) -> dict[str, float]:
    """Return the value of every statistic.

    Raises:
        ArgumentError: one that fails, or gives anything else than a number.
    """
    values = {}
    for name, statistic in statistics.items():
        try:
            values[name] = float(statistic(y))
        except Exception as error:
            raise ArgumentError(
                f"statistic {name!r} failed for observations of shape {tuple(y.shape)} and dtype {y.dtype}: "
                f"{type(error).__name__}: {error}. It has to give one number, such as y.quantile(0.9)"
            ) from error
    return values
