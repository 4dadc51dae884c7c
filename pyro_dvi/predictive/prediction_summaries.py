# SPDX-License-Identifier: Apache-2.0
"""Scores of a prediction by the kind of site, and its tables for pandas and xarray."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pyro_dvi.predictive import metrics

if TYPE_CHECKING:
    import pandas
    import xarray


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


def dataframe(columns: Mapping[str, Tensor], num_rows: int) -> "pandas.DataFrame":
    """Return a ``pandas.DataFrame``; see :meth:`Prediction.to_dataframe`."""
    import pandas

    found: dict[str, np.ndarray] = {}
    for name, value in columns.items():
        array = array_of(value)
        if array.ndim == 1:
            found[name] = array
            continue
        for place in np.ndindex(array.shape[1:]):
            found[f"{name}[{', '.join(map(str, place))}]"] = array[(slice(None), *place)]
    return pandas.DataFrame(found, index=pandas.RangeIndex(num_rows, name="example"))


def dataset(
    columns: Mapping[str, Tensor], draws: Mapping[str, Tensor], cell_dims: int, attributes: Mapping[str, str]
) -> "xarray.Dataset":
    """Return an ``xarray.Dataset``; see :meth:`Prediction.to_xarray`.

    Args:
        columns: by name, examples first.
        draws: by name, draws first and then examples.
        cell_dims: dimensions of one example's values, without that of classes.
        attributes: of the whole.
    """
    import xarray

    dims = ["example", *(f"dim_{i}" for i in range(cell_dims)), "class"]
    variables = {name: (dims[: value.dim()], array_of(value)) for name, value in columns.items()}
    for name, value in draws.items():
        variables[f"draws_{name}"] = (["draw", *dims[: value.dim() - 1]], array_of(value))
    return xarray.Dataset(variables, attrs=dict(attributes))


def array_of(value: Tensor) -> np.ndarray:
    """Return the values on the CPU, half precision as single."""
    value = value.detach().cpu()
    if value.dtype in (torch.bfloat16, torch.float16):  # NumPy has no bfloat16, netCDF no half precision
        value = value.float()
    return value.numpy()
