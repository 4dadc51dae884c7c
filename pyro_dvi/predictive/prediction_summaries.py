# SPDX-License-Identifier: Apache-2.0
"""Scores of a prediction, which depend on the kind of the predicted site, and the table of a prediction for pandas."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pyro_dvi.errors import DataError, UnsupportedError
from pyro_dvi.predictive import metrics

if TYPE_CHECKING:
    import pandas

    from pyro_dvi.predictive.prediction import Prediction


def available(read: Callable[[], Any]) -> Any:
    """Return a quantity, or None if it does not exist; for example, several labels have no joint entropy."""
    try:
        return read()
    except UnsupportedError:
        return None


def metrics_of(prediction: "Prediction", values: Tensor, y: Any) -> dict[str, float]:
    """Return :meth:`Prediction.metrics`.

    Args:
        prediction: the prediction.
        values: the observations that are scored.
        y: the observations as the user passed them; None for those that came with the data.
    """
    mask, log_likelihood = prediction.mask, prediction.log_likelihood(y)
    if mask is not None:
        log_likelihood = log_likelihood[~log_likelihood.isnan()]
    if log_likelihood.numel() == 0:
        raise DataError(f"the mask of site {prediction.site!r} excludes all observations")
    if prediction.is_one_hot:
        values, mask = values.argmax(-1), None if mask is None else mask.any(-1)

    def counted(tensor: Tensor) -> Tensor:
        return tensor if mask is None else tensor[mask]

    score, values = metrics.nll(log_likelihood), counted(values)
    found = {"nll": score.value, "nll_standard_error": score.standard_error}
    if prediction.is_of_classes:
        p = counted(prediction.probabilities)
        rows = torch.stack([1 - p, p], -1) if p.shape == values.shape else p
        found |= {
            "accuracy": metrics.accuracy(p, values),
            "brier": metrics.brier(p, values),
            "ece": metrics.expected_calibration_error(p, values),
            "aumrc": metrics.aumrc(p, values),
            "entropy": float(torch.special.entr(rows.cpu().double()).sum(-1).mean()),
        }
        if (information := available(lambda: counted(prediction.mutual_information))) is not None:
            found["mutual_information"] = float(information.cpu().double().mean())
    elif prediction.has_moments:
        mean = counted(prediction.mean)
        if mean.isfinite().all():  # a Cauchy distribution has no mean
            found["rmse"] = metrics.rmse(mean, values)
        if (limits := available(prediction.interval)) is not None:
            low, high = map(counted, limits)
            found["coverage_95"] = metrics.coverage(low, high, values)
            found["width_95"] = float((high - low).cpu().double().mean())
        # The cost is quadratic in the number of components.
        few = prediction.draws or prediction.num_components <= 100
        if few and (crps := available(lambda: counted(prediction.crps(y)))) is not None:
            found["crps"] = float(crps.mean())
    return found


def columns_of(prediction: "Prediction") -> dict[str, Tensor]:
    """Return, by name, the quantities that the prediction has, with examples in the first dimension."""
    names: tuple[str, ...] = ("mean", "std", "aleatoric", "epistemic") if prediction.has_moments else ()
    if prediction.is_of_classes:
        names = ("probabilities", "entropy", "mutual_information")
    found = {name: available(partial(getattr, prediction, name)) for name in names}
    if prediction.observed is not None:
        found |= {"observed": prediction.observed, "log_likelihood": prediction.log_likelihood()}
    return {name: value for name, value in found.items() if value is not None}


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


def array_of(value: Tensor) -> np.ndarray:
    """Return the values on the CPU, with half precision converted to single precision."""
    value = value.detach().cpu()
    if value.dtype in (torch.bfloat16, torch.float16):  # NumPy has no bfloat16, and netCDF no half precision
        value = value.float()
    return value.numpy()
