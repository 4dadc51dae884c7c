# SPDX-License-Identifier: Apache-2.0
"""Probabilities and labels of what a plot of classes is given."""

from typing import Any

import torch

from pyro_dvi.errors import DataError


def of_classes(prediction: Any, labels: Any, name: str = "") -> tuple[Any, Any]:
    """Return class probabilities and the labels to compare them with, without those that the model masks.

    Args:
        prediction: probabilities, or a :class:`~pyro_dvi.Prediction` of classes.
        labels: observed classes; None for those of the prediction.
        name: of the method, for errors.

    Raises:
        DataError: no labels.
        UnsupportedError: a prediction of numbers.
    """
    if not hasattr(prediction, "probabilities"):
        if labels is None:
            raise DataError("probabilities need labels to tell right from wrong: pass labels")
        return prediction, labels
    p = prediction.probabilities
    observed = prediction.observed if labels is None else labels
    if observed is None:
        what = f"the predictions of {name!r}" if name else "the predictions"
        raise DataError(f"{what} came without labels: pass labels, or predict from data that hold them")
    observed = torch.as_tensor(observed, device=p.device)
    kept = prediction.mask
    if prediction.is_one_hot:
        kept = None if kept is None else kept.any(-1)
        observed = observed.argmax(-1) if observed.shape == p.shape else observed
    # Labels of another shape are refused where they are scored.
    if kept is None or observed.shape != kept.shape:
        return p, observed
    return p[kept], observed[kept]
