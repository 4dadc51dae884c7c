# SPDX-License-Identifier: Apache-2.0
r"""Groups of named arrays with dimensions, and the ArviZ object that contains them.

Only this module distinguishes versions of ArviZ.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_dvi.predictive.prediction_summaries import array_of

_SAMPLE_DIMS = ["chain", "draw"]


@dataclass
class Group:
    """Variables by name.

    Attributes:
        sampled: True if the dimensions ``chain`` and ``draw`` come first.
        arrays: values by variable; if ``sampled`` is true, they include the dimensions ``chain`` and ``draw``.
        dims: names of the other dimensions by variable.
        coords: positions of the observations that are not masked, by dimension.
    """

    sampled: bool = True
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    dims: dict[str, list[str]] = field(default_factory=dict)
    coords: dict[str, np.ndarray] = field(default_factory=dict)

    def add(
        self,
        name: str,
        array: np.ndarray,
        plates: Sequence[str | None] = (),
        counts: np.ndarray | None = None,
    ) -> None:
        """Add a variable; draws are passed without the dimension ``chain``.

        Masked values become NaN. If draws are masked, the remaining values of each draw have one dimension,
        ``<name>_observed``, whose coordinates are the positions of these values in the flattened array.

        Args:
            name: name of the variable; slashes, which would create groups in a file, become dots.
            array: values of the variable.
            plates: names of the dimensions of ``array``, without those of draws; None for ``<name>_dim_<i>``.
            counts: mask over the first dimensions of a draw, True for the values to keep; None to keep all.
        """
        name = name.replace("/", ".")
        if counts is not None and not counts.all():
            if self.sampled:
                array = array[:, counts]
                plates = [f"{name}_observed", *plates[counts.ndim :]]
                self.coords[f"{name}_observed"] = np.flatnonzero(counts)
            else:
                array = np.where(counts, array, np.nan)  # integers become floating-point numbers
        rank = array.ndim - self.sampled
        self.arrays[name] = array[None] if self.sampled else array
        self.dims[name] = [plate or f"{name}_dim_{i}" for i, plate in zip_longest(range(rank), plates[:rank])]

    def dataset(self, arviz: Any, coords: Mapping[Any, Any], dims: Mapping[Any, Sequence[Any]]) -> Any:
        """Return an ``xarray.Dataset``, given the user's coordinates and names of dimensions."""
        named = {}
        for name, own in self.dims.items():
            users = () if self.coords.keys() & set(own) else dims.get(name, ())  # not for positions
            named[name] = [*users, *own[len(users) :]][: len(own)]
        leading = "sample_dims" if _is_tree(arviz) else "default_dims"
        options = {leading: _SAMPLE_DIMS if self.sampled else [], "coords": {**coords, **self.coords}}
        return arviz.dict_to_dataset(self.arrays, dims=named, **options)


class Groups(dict[str, Group]):
    """Groups by name; a new group is empty, and has draws unless its name contains "data", as in ArviZ."""

    def __missing__(self, name: str) -> Group:
        self[name] = Group(sampled="data" not in name)
        return self[name]


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
            names[dim] = frame.name.replace("/", ".")
    return names


def as_array(value: Tensor) -> np.ndarray:
    """Return the values on the CPU; half precision is converted to single precision, and booleans to 0 and 1."""
    return array_of(value.to(torch.int8) if value.dtype == torch.bool else value)


def assemble(
    groups: Groups,
    attributes: Mapping[str, Any],
    coords: Mapping[Any, Any],
    dims: Mapping[Any, Sequence[Any]],
) -> Any:
    """Return ``InferenceData`` with ArviZ 0.x, ``xarray.DataTree`` with ArviZ 1.x.

    Args:
        groups: groups by name; empty groups are omitted.
        attributes: attributes of the whole object.
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
        "inference_library": "pyro_dvi",
        "inference_library_version": version("pyro-dvi"),
        **attributes,
    }
    # ArviZ plots integers and floating-point numbers differently, so labels with NaN are converted in all groups.
    for site, observed in groups["observed_data"].arrays.items():
        for drawn in (groups["posterior_predictive"].arrays, groups["prior_predictive"].arrays):
            if site in drawn and drawn[site].dtype.kind == "i" and observed.dtype.kind == "f":
                drawn[site] = drawn[site].astype(observed.dtype)
    datasets = {
        name: group.dataset(arviz, {} if name.startswith("predictions") else coords, dims)
        for name, group in groups.items()
        if group.arrays
    }
    if not _is_tree(arviz):
        return arviz.InferenceData(attrs=attributes, **datasets)
    from xarray import DataTree

    tree = DataTree.from_dict(datasets)
    tree.attrs.update(attributes)
    return tree


def _is_tree(arviz: Any) -> bool:
    return int(arviz.__version__.split(".")[0]) >= 1
