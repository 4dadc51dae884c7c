# SPDX-License-Identifier: Apache-2.0
"""The scores of a prediction, by the kind of what is predicted."""

import torch
from torch import Tensor

from pyro_dvi.predictive import metrics


def of_densities(log_likelihood: Tensor) -> dict[str, float]:
    """Return the scores of the log density of each observation."""
    score = metrics.nll(log_likelihood)
    return {"nll": score.value, "nll_standard_error": score.standard_error}


def of_classes(probabilities: Tensor, labels: Tensor, information: Tensor | None) -> dict[str, float]:
    """Return the scores of class probabilities.

    Args:
        probabilities: ``[..., C]``, or those of label 1 of the shape of the labels.
        labels: observed classes.
        information: that each label would give on the weights; None where it is not known.
    """
    rows = torch.stack([1 - probabilities, probabilities], -1)
    found = {
        "accuracy": metrics.accuracy(probabilities, labels),
        "brier": metrics.brier(probabilities, labels),
        "ece": metrics.expected_calibration_error(probabilities, labels),
        "adaptive_ece": metrics.adaptive_calibration_error(probabilities, labels),
        "aumrc": metrics.aumrc(probabilities, labels),
        "entropy": float(
            metrics.predictive_entropy(rows if probabilities.shape == labels.shape else probabilities).mean()
        ),
    }
    if information is not None:
        found["mutual_information"] = float(information.cpu().double().mean())
    return found


def of_numbers(
    values: Tensor, mean: Tensor, interval: tuple[Tensor, Tensor] | None, crps: Tensor | None
) -> dict[str, float]:
    """Return the scores of predicted numbers.

    Args:
        values: what was observed.
        mean: of the predictions, of the same shape.
        interval: limits of their central 95 % intervals; None where there are none.
        crps: their continuous ranked probability scores; None where there are none.
    """
    found = {}
    if mean.isfinite().all():  # there is none of a Cauchy distribution
        found["rmse"] = metrics.rmse(mean, values)
    if interval is not None:
        found["coverage_95"] = metrics.coverage(*interval, values)
        found["width_95"] = metrics.interval_width(*interval)
    if crps is not None:
        found["crps"] = float(crps.mean())
    return found
