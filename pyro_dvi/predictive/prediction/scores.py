# SPDX-License-Identifier: Apache-2.0
"""The scores of a prediction, by the kind of what is predicted; only observations that count are scored."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyro_dvi import metrics
from pyro_dvi.errors import DataError, UnsupportedError

if TYPE_CHECKING:
    from pyro_dvi.predictive.prediction.prediction import Prediction

__all__ = ["scores"]


def scores(prediction: "Prediction", y: Any, values: Tensor) -> dict[str, float]:
    """Return the scores of a prediction, as :meth:`Prediction.metrics` documents them.

    Args:
        prediction: what is scored.
        y: what the caller gave; None for the values that came with the data.
        values: the one or the other, as a tensor.

    Raises:
        DataError: the mask of the model leaves nothing to score.
    """
    log_likelihood = prediction.log_likelihood(y)
    scored = log_likelihood if prediction.mask is None else log_likelihood[~log_likelihood.isnan()]
    if scored.numel() == 0:
        raise DataError(f"the mask of site {prediction.site!r} leaves no observation to score")
    score = metrics.nll(scored)
    found = {"nll": score.value, "nll_standard_error": score.standard_error}
    if prediction.is_of_classes:
        return found | _of_classes(prediction, values)
    if prediction.has_moments:
        return found | _of_numbers(prediction, y, values)
    return found


def _of_classes(prediction: "Prediction", labels: Tensor) -> dict[str, float]:
    p, mask = prediction.probabilities, prediction.mask
    if prediction.is_one_hot:
        labels = labels.argmax(-1)
        mask = None if mask is None else mask.any(-1)
    if mask is not None:
        p, labels = p[mask], labels[mask]
    rows = torch.stack([1 - p, p], -1) if p.shape == labels.shape else p
    found = {
        "accuracy": metrics.accuracy(p, labels),
        "brier": metrics.brier(p, labels),
        "ece": metrics.expected_calibration_error(p, labels),
        "adaptive_ece": metrics.adaptive_calibration_error(p, labels),
        "aurc": metrics.aurc(p, labels),
        "aumrc": metrics.aumrc(p, labels),
        "entropy": float(metrics.predictive_entropy(rows).mean()),
    }
    if prediction.method.tells_noise_apart:
        information = prediction.mutual_information
        information = information if mask is None else information[mask]
        found["mutual_information"] = float(information.cpu().double().mean())
    return found


def _of_numbers(prediction: "Prediction", y: Any, values: Tensor) -> dict[str, float]:
    mask = prediction.mask

    def counted(tensor: Tensor) -> Tensor:
        return tensor if mask is None else tensor[mask]

    found, mean = {}, counted(prediction.mean)
    if mean.isfinite().all():  # there is none of a Cauchy distribution
        found["rmse"] = metrics.rmse(mean, counted(values))
    try:
        low, high = (counted(limit) for limit in prediction.interval(0.95))
        found["coverage_95"] = metrics.coverage(low, high, counted(values))
        found["width_95"] = metrics.interval_width(low, high)
    except UnsupportedError:
        pass
    try:
        found["crps"] = float(counted(prediction.crps(y)).mean())
    except UnsupportedError:
        pass
    return found
