# SPDX-License-Identifier: Apache-2.0
"""A prediction as a table, as labelled arrays, and as an object of ArviZ."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.predictive.prediction.component import whole_events

if TYPE_CHECKING:
    from pyro_dvi.predictive.prediction.prediction import Prediction

__all__ = ["arviz_of", "dataframe", "dataset"]

_MOMENTS = ("mean", "std", "aleatoric", "epistemic")


def _available(prediction: "Prediction") -> Iterator[tuple[str, Tensor]]:
    """Give what there is to say about each example, examples first."""
    names: tuple[str, ...] = _MOMENTS
    if prediction.is_of_classes:
        names = ("probabilities", "entropy", "mutual_information")
    elif not prediction.has_moments:
        names = ()
    for name in names:
        try:
            yield name, getattr(prediction, name)
        except UnsupportedError:  # the joint entropy of several labels, say
            continue
    if prediction.observed is not None:
        yield "observed", prediction.observed
        yield "log_likelihood", prediction.log_likelihood()


def dataframe(prediction: "Prediction") -> Any:
    """Return a ``pandas.DataFrame``; see :meth:`Prediction.to_dataframe`."""
    import pandas

    columns: dict[str, np.ndarray] = {}
    for name, value in _available(prediction):
        array = _array(value)
        if array.ndim == 1:
            columns[name] = array
            continue
        for place in np.ndindex(array.shape[1:]):
            columns[f"{name}[{', '.join(map(str, place))}]"] = array[(slice(None), *place)]
    return pandas.DataFrame(columns, index=pandas.RangeIndex(len(prediction), name="example"))


def dataset(prediction: "Prediction") -> Any:
    """Return an ``xarray.Dataset``; see :meth:`Prediction.to_xarray`."""
    import xarray

    variables = {}
    dims = ["example", *(f"dim_{i}" for i in range(_cell_dims(prediction))), "class"]
    for name, value in _available(prediction):
        variables[name] = (dims[: value.dim()], _array(value))
    for name, value in prediction.draws.items():
        variables[f"draws_{name}"] = (["draw", *dims[: value.dim() - 1]], _array(value))
    attributes = {"site": prediction.site, "method": repr(prediction.method)}
    return xarray.Dataset(variables, attrs=attributes)


def _cell_dims(prediction: "Prediction") -> int:
    """Dimensions of one example's values, without that of classes."""
    if prediction.is_of_classes:
        p = prediction.probabilities
        return p.dim() - 1 if prediction.is_binary else p.dim() - 2
    return prediction.mean.dim() - 1 if prediction.has_moments else 0


def arviz_of(prediction: "Prediction", num_samples: int, seed: int | None) -> Any:
    """Return ``InferenceData`` or a ``DataTree``; see :meth:`Prediction.to_arviz`."""
    from pyro_dvi.inference_data.assemble import assemble  # a later chapter: only when it is asked for
    from pyro_dvi.inference_data.group import Group

    predictive, observed, log_likelihood = Group(), Group(sampled=False), Group()
    site = prediction.site
    predictive.add(site, _array(prediction.sample(num_samples, seed=seed)))
    values = prediction.observed
    if values is not None:
        density = prediction.log_likelihood()
        own = prediction.draws.get("log_likelihood")
        dims: list[str | None] = []
        if prediction.mask is not None:
            counts = whole_events(prediction.mask, values.dim() - density.dim(), site)
            values, own = values[counts], None if own is None else own[:, counts]
            name = f"{site.replace('/', '.')}_observed"
            dims = [name]
            for group in (observed, log_likelihood):
                group.coords[name] = np.flatnonzero(_array(counts))
        observed.add(site, _array(values), dims)
        if own is not None and len(own) == num_samples:
            log_likelihood.add(site, _array(own), dims)
    groups = {
        "posterior_predictive": predictive,
        "log_likelihood": log_likelihood,
        "observed_data": observed,
    }
    attributes: dict[str, Any] = {"method": repr(prediction.method), "site": site}
    if seed is not None:
        attributes["seed"] = seed
    return assemble(groups, attributes, {}, {})


def _array(value: Tensor) -> np.ndarray:
    value = value.detach().cpu()
    if value.dtype in (torch.bfloat16, torch.float16):  # NumPy has no bfloat16
        value = value.float()
    return value.numpy()
