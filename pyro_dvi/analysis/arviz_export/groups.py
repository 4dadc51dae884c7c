# SPDX-License-Identifier: Apache-2.0
r"""Groups of named arrays with dimensions, and the ArviZ object that contains them.

Only this module distinguishes versions of ArviZ.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import zip_longest
from typing import Any

import numpy as np
import pyro
import torch
from torch import Tensor

from pyro_dvi.errors import ModelError
from pyro_dvi.predictive import Prediction
from pyro_dvi.predictive.prediction_summaries import array_of
from pyro_dvi.predictive.predictive_distribution import with_any

_SAMPLE_DIMS = ("chain", "draw")


@dataclass
class Group:
    """Variables by name.

    Attributes:
        sampled: True if the dimensions ``chain`` and ``draw`` come first.
        arrays: values by variable; if ``sampled`` is true, they include the dimensions ``chain`` and ``draw``.
        suggested: names of the other dimensions by variable; None for a dimension without a name.
        coords: coordinates by dimension, such as the positions of the observations that are not masked.
    """

    sampled: bool = True
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    suggested: dict[str, Sequence[str | None]] = field(default_factory=dict)
    coords: dict[str, np.ndarray] = field(default_factory=dict)

    def add(
        self,
        name: str,
        array: np.ndarray,
        suggested: Sequence[str | None] = (),
        counts: np.ndarray | None = None,
    ) -> None:
        """Add a variable; draws are passed without the dimension ``chain``.

        Masked values become NaN. If draws are masked, the remaining values of each draw have one dimension,
        ``<name>_observed``, whose coordinates are the positions of these values in the flattened array.

        Args:
            name: name of the variable.
            array: values of the variable.
            suggested: names of the dimensions of ``array``, without those of draws.
            counts: mask over the first dimensions of a draw, True for the values to keep; None to keep all.

        Raises:
            ModelError: if ArviZ has a dimension of this name.
        """
        name = safe_name(name)
        if counts is not None and not self.sampled:
            array = (
                array if counts.all() else np.where(counts, array, np.nan)
            )  # integers become floating-point numbers
        elif counts is not None and not counts.all():
            array = array[:, counts]
            suggested = [f"{name}_observed", *suggested[counts.ndim :]]
            self.coords[f"{name}_observed"] = np.flatnonzero(counts)
        if name in _SAMPLE_DIMS:
            raise ModelError(
                f"ArviZ uses the name {name!r} for a dimension: rename the site or input in the model"
            )
        self.arrays[name] = array[None] if self.sampled else array
        self.suggested[name] = tuple(suggested)

    def dims(self, given: Mapping[Any, Sequence[Any]]) -> dict[str, list[Any]]:
        """Return names for all dimensions: the user's, or else the name of a plate, or else ``<variable>_dim_<i>``.

        A plate's name is not used if it is the name of a variable, or if the dimension has different lengths in this
        group.
        """
        lengths: dict[Any, int] = {}
        named: dict[str, list[Any]] = {}
        for name, array in self.arrays.items():
            shape = array.shape[2 if self.sampled else 0 :]
            suggested = self.suggested[name][: len(shape)]
            is_flat = any(dim in self.coords for dim in suggested)  # the user's names do not apply
            users = () if is_flat else given.get(name, ())
            mine: list[Any] = []
            for i, (length, dim, plate) in enumerate(zip_longest(shape, users[: len(shape)], suggested)):
                if dim is None:
                    fits = plate is not None and lengths.get(plate, length) == length and plate not in mine
                    is_free = plate not in self.arrays and plate not in _SAMPLE_DIMS
                    dim = plate if fits and is_free else f"{name}_dim_{i}"
                mine.append(dim)
            lengths |= dict(zip(mine, shape, strict=True))
            named[name] = mine
        return named


def safe_name(name: str) -> str:
    """Return the name with its slashes replaced, because a slash would create a group in the file."""
    return name.replace("/", ".")


def plate_names(node: Any, shape: Sequence[int]) -> list[str | None]:
    """Name the dimensions of a site's value after its plates.

    Args:
        node: the site in a trace of the model.
        shape: shape of its value.

    Returns:
        One entry per dimension; None if it belongs to no plate.
    """
    names: list[str | None] = [None] * len(shape)
    for frame in node["cond_indep_stack"]:
        if not frame.vectorized:
            continue
        dim = frame.dim - len(node["fn"].event_shape)
        if len(shape) >= -dim and shape[dim] == frame.size:
            names[dim] = safe_name(frame.name)
    return names


def as_array(value: Tensor) -> np.ndarray:
    """Return the values on the CPU; half precision is converted to single precision, and booleans to 0 and 1."""
    return array_of(value.to(torch.int8) if value.dtype == torch.bool else value)


def joined(pieces: list[np.ndarray], axis: int) -> np.ndarray:
    """Concatenate along ``axis``; the list is emptied on the way, so that no piece is stored twice."""
    if len(pieces) == 1:
        return pieces.pop()
    shape = list(pieces[0].shape)
    shape[axis] = sum(piece.shape[axis] for piece in pieces)
    whole = np.empty(shape, np.result_type(*pieces))
    end = shape[axis]
    along = np.moveaxis(whole, axis, 0)
    while pieces:
        piece = np.moveaxis(pieces.pop(), axis, 0)
        along[end - len(piece) : end] = piece
        end -= len(piece)
    return whole


def assemble(
    groups: Mapping[str, Group],
    attributes: Mapping[str, Any],
    coords: Mapping[Any, Any],
    dims: Mapping[Any, Sequence[Any]],
) -> Any:
    """Return ``InferenceData`` with ArviZ 0.x, ``xarray.DataTree`` with ArviZ 1.x.

    Args:
        groups: groups by name; empty groups are omitted.
        attributes: attributes of the whole object; the time and the versions of the libraries are added.
        coords: the user's coordinates, for all groups except predictions.
        dims: the user's names of dimensions, by variable.
    """
    with warnings.catch_warnings():
        # On import, ArviZ 0.23 warns about version 1; both versions are supported here.
        warnings.filterwarnings(
            "ignore", message=r"\s*ArviZ is undergoing a major refactor", category=FutureWarning
        )
        import arviz

    attributes = {
        "created_at": datetime.now(UTC).isoformat(),
        "inference_library": "pyro_dvi",
        "inference_library_version": version("pyro-dvi"),
        "pyro_version": pyro.__version__,
        "torch_version": str(torch.__version__),
        **attributes,
    }
    if groups["observed_data"].arrays and not groups["log_likelihood"].arrays:
        attributes["log_likelihood_left_out"] = (
            "the predictive distribution is the same for every draw, so az.loo cannot reweight draws. Compare "
            "predictions of held-out data with diagnostics.compare_held_out, or train with sampled weights and export "
            "with method=Samples(500)"
        )
    # ArviZ plots integers and floating-point numbers differently, so labels with NaN are converted in all groups.
    for name in groups.keys() & {"posterior_predictive", "prior_predictive"}:
        arrays = groups[name].arrays
        for site, values in groups["observed_data"].arrays.items():
            if site in arrays and values.dtype.kind == "f" != arrays[site].dtype.kind:
                arrays[site] = arrays[site].astype(values.dtype)
    is_tree = int(arviz.__version__.split(".")[0]) >= 1
    leading = "sample_dims" if is_tree else "default_dims"
    datasets = {}
    for name, group in groups.items():
        if group.arrays:
            users = {} if name.startswith("predictions") else coords
            options = {
                leading: list(_SAMPLE_DIMS) if group.sampled else [],
                "coords": {**users, **group.coords},
            }
            datasets[name] = arviz.dict_to_dataset(group.arrays, dims=group.dims(dims), **options)
    if not is_tree:
        return arviz.InferenceData(attrs=attributes, **datasets)
    from xarray import DataTree

    tree = DataTree.from_dict(datasets)
    tree.attrs.update(attributes)
    return tree


@Prediction.exported_by
def of_prediction(prediction: Prediction, num_samples: int, seed: int | None) -> Any:
    """Return a prediction as an ArviZ object; see :meth:`~pyro_dvi.predictive.Prediction.to_arviz`."""
    predictive, observed, log_likelihood = Group(), Group(sampled=False), Group()
    site, values = prediction.site, prediction.observed
    predictive.add(site, as_array(prediction.sample(num_samples, seed=seed)))
    if values is not None:
        counts = torch.ones_like(values, dtype=torch.bool) if prediction.mask is None else prediction.mask
        observed.add(site, as_array(values), (), as_array(counts) > 0)
        own = prediction.draws.get("log_likelihood")
        if own is not None and len(own) == num_samples:
            scored = with_any(counts, values.dim() - prediction.log_likelihood().dim())
            log_likelihood.add(site, as_array(own), (), as_array(scored) > 0)
    groups = {"posterior_predictive": predictive, "log_likelihood": log_likelihood, "observed_data": observed}
    attributes = {"method": repr(prediction.method), "site": site, **({} if seed is None else {"seed": seed})}
    return assemble(groups, attributes, {}, {})
