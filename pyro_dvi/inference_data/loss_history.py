# SPDX-License-Identifier: Apache-2.0
"""The course of the training as a group of its own."""

import numpy as np

from pyro_dvi.errors import ArgumentError
from pyro_dvi.inference_data.group import Group
from pyro_dvi.training import History

__all__ = ["training_group"]


def training_group(history: History) -> Group:
    """Return the columns of the epochs along a dimension ``epoch``.

    A group of its own, not ``sample_stats``: epochs are no draws.

    Raises:
        ArgumentError: not what ``fit`` returned, or no epoch.
    """
    if not isinstance(history, History):
        raise ArgumentError(
            f"history must be what pyro_dvi.fit returned, not {type(history).__name__}: "
            "History.from_dict and History.from_json read saved ones"
        )
    if not history.epochs.rows:
        raise ArgumentError("the history holds no finished epoch to export")
    group = Group(sampled=False)
    for name, column in history.epochs.items():
        if name != "epoch":
            group.add(name, np.asarray(column), ["epoch"])
    group.coords["epoch"] = np.asarray(history["epoch"], dtype=int)
    return group
