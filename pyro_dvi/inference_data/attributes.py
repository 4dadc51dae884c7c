# SPDX-License-Identifier: Apache-2.0
"""What was exported and how, in values that a netCDF file can hold."""

from collections.abc import Callable
from typing import Any

from pyro_dvi.inference_data.samples import GivenSamples
from pyro_dvi.predictive import PredictionRule
from pyro_dvi.training import History

__all__ = ["attributes"]


def attributes(
    guide: Callable[..., Any], rule: PredictionRule, elbo: Any, history: History | None, seed: int
) -> dict[str, Any]:
    """Return guide, method, objective, KL weight and seed.

    The KL weight is that of the objective, else of the guide, else of the last epoch of the history.
    """
    is_given = isinstance(rule, GivenSamples)
    found: dict[str, Any] = {
        "guide": "samples" if is_given else getattr(guide, "__name__", type(guide).__name__),
        "method": repr(rule),
        "seed": seed,
    }
    if elbo is not None:
        found["elbo"] = type(elbo).__name__
    weight = _kl_weight(elbo, guide, history)
    if weight is not None:
        found["kl_weight"] = weight
    return found


def _kl_weight(elbo: Any, guide: Any, history: History | None) -> float | str | None:
    weight = getattr(elbo, "kl_weight", None)
    if callable(weight):  # a schedule: what it last gave
        weight = (getattr(elbo, "terms", None) or {}).get("kl_weight", repr(weight))
    if weight is None:
        weight = getattr(guide, "kl_weight", None)
    if weight is None and history is not None:
        weight = history.epochs.last().get("kl_weight")
    return weight if weight is None or isinstance(weight, str) else float(weight)
