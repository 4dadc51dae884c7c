# SPDX-License-Identifier: Apache-2.0
"""Which share of the joint minibatch each process has."""

import math
from typing import Any

import numpy as np
import torch
from pyro.poutine.messenger import Messenger

from pyro_dvi.errors import DataError, ModelError, UnsupportedError
from pyro_dvi.runs.sites import is_data, subsampled_share


class Fractions(Messenger):
    """Note which part of the data set each observed site sees."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, float] = {}

    def _pyro_post_sample(self, msg: Any) -> None:
        if not is_data(msg):
            return
        fraction = subsampled_share(msg)
        scale = msg["scale"]
        if fraction == 1.0 and not (torch.is_tensor(scale) and scale.numel() > 1):
            fraction = 1.0 / float(scale)
        # The first run of a step sees all rows; a curvature may look at some of them again.
        self.found.setdefault(msg["name"], fraction)


def weights_of(fractions: list[dict[str, float]], whole_data: bool) -> list[float]:
    r"""Weights :math:`m_k / \sum_j m_j` of the processes."""
    if len(fractions) == 1:
        return [1.0]
    sites = fractions[0]
    if not sites or any(set(other) != set(sites) for other in fractions):
        raise ModelError(
            f"the processes do not observe the same sites: {[sorted(other) for other in fractions]}. Each needs some "
            "of the data in every step."
        )
    split = [site for site in sites if any(other[site] != 1.0 for other in fractions)]
    if not split:
        if whole_data:
            return [1 / len(fractions)] * len(fractions)
        raise DataError(
            f"observed site {next(iter(sites))!r} does not say how large the data set is, so the parts of the "
            "processes cannot be put together: use pyro.plate('data', size=N, subsample_size=len(x)) with the "
            "number N of all examples. If every process has all of them, pass draws=OwnDraws()."
        )
    totals = {site: math.fsum(other[site] for other in fractions) for site in split}
    first, *others = ([other[site] / totals[site] for other in fractions] for site in split)
    for site, weights in zip(split[1:], others, strict=True):
        if not np.allclose(weights, first, rtol=0.0, atol=1e-9):
            raise UnsupportedError(
                f"the observed sites {split[0]!r} and {site!r} are split among the processes in different proportions: "
                "give each process the same share of all data"
            )
    return first
