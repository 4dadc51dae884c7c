# SPDX-License-Identifier: Apache-2.0
r"""One group of an ArviZ object before ArviZ sees it: arrays, and what is known of their names and dimensions.

Build the object of whichever ArviZ is installed: the only place that knows its versions.
"""

import difflib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import zip_longest
from typing import Any

import numpy as np
import pyro
import torch
from torch import Tensor

from pyro_dvi.errors import ArgumentError, ModelError
from pyro_dvi.predictive import Prediction
from pyro_dvi.predictive.prediction_summaries import array_of
from pyro_dvi.predictive.predictive_distribution import with_any

Dims = Mapping[Any, Sequence[Any]]
Coords = Mapping[Any, Any]

_SAMPLE_DIMS = ("chain", "draw")


@dataclass
class Group:
    """Variables by name.

    Attributes:
        sampled: whether dimensions ``chain`` and ``draw`` come first.
        arrays: values; those of a sampled group with both dimensions.
        suggested: names of the other dimensions, None where none is known.
        coords: coordinates that belong to the values, such as the places of observations that are not masked.
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
        """Add a variable; draws come without their chain.

        Where a mask leaves something out, values are NaN; what is left of draws has one dimension, ``<name>_observed``,
        with the places in the flattened array as its coordinates.

        Args:
            name: of the variable.
            array: its values.
            suggested: names of their dimensions.
            counts: which of the values of a draw are kept, by their first dimensions; None if all are.

        Raises:
            ModelError: its name is that of one of ArviZ's dimensions.
        """
        name = safe_name(name)
        if counts is not None and not self.sampled:
            array = array if counts.all() else np.where(counts, array, np.nan)  # whole numbers as real ones
        elif counts is not None and not counts.all():
            array = array[:, counts]
            suggested = [f"{name}_observed", *suggested[counts.ndim :]]
            self.coords[f"{name}_observed"] = np.flatnonzero(counts)
        if name in _SAMPLE_DIMS:
            raise ModelError(
                f"ArviZ calls a dimension {name!r}: rename the site or input of this name in the model"
            )
        self.arrays[name] = array[None] if self.sampled else array
        self.suggested[name] = tuple(suggested)

    def split(self, chains: int) -> None:
        """Lay the draws out as so many chains, the first draws in the first chain."""
        for name, array in self.arrays.items():
            self.arrays[name] = array.reshape(chains, -1, *array.shape[2:])

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a variable without chain and draw."""
        return self.arrays[name].shape[2 if self.sampled else 0 :]

    def dims(self, given: Dims) -> dict[str, list[str]]:
        """Name every dimension: as the user says, else after plates, else ``<variable>_dim_<i>``.

        A plate gives no name where it would be that of a variable, or of another length in this group.
        """
        lengths: dict[Any, int] = {}
        named: dict[str, list[Any]] = {}
        for name in self.arrays:
            shape = self.shape(name)
            suggested = self.suggested[name][: len(shape)]
            is_flat = any(dim in self.coords for dim in suggested)  # without the user's dimensions
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

    def coordinates(self, dims: Mapping[str, Sequence[Any]], given: Coords) -> dict[Any, Any]:
        """Return the coordinates of this group's dimensions."""
        used = {dim for mine in dims.values() for dim in mine}
        return {**{dim: values for dim, values in given.items() if dim in used}, **self.coords}


def check_names(groups: Mapping[str, Group], dims: Dims, coords: Coords, left_out: Sequence[str]) -> None:
    """Refuse names that belong to nothing.

    Raises:
        ArgumentError: dimensions of a variable that no group has, more of them than it has, names that are no text or
            taken, or coordinates of no dimension.
    """
    ranks: dict[str, int] = {}
    for group in groups.values():
        for name in group.arrays:
            ranks[name] = max(len(group.shape(name)), ranks.get(name, 0))
    for name, given in dims.items():
        if name not in ranks and name not in left_out:
            raise ArgumentError(f"dims names no variable {name!r}; close names: {close_names(name, ranks)}")
        _check_dims(name, given, ranks.get(name))
    existing = {dim for group in groups.values() for mine in group.dims(dims).values() for dim in mine}
    existing |= {dim for given in dims.values() for dim in given}
    for dim, values in coords.items():
        if not hasattr(values, "__len__"):
            raise ArgumentError(f"coords[{dim!r}] = {values!r}: give a value for each place of the dimension")
        if dim not in existing:
            raise ArgumentError(
                f"coords names no dimension {dim!r}; close names: {close_names(dim, map(str, existing))}"
            )


def _check_dims(name: str, given: Any, rank: int | None) -> None:
    if not isinstance(given, (list, tuple)):
        raise ArgumentError(f"dims[{name!r}] = {given!r}, but it is a list of names, as in ArviZ")
    if rank is not None and len(given) > rank:
        raise ArgumentError(f"dims[{name!r}] = {given!r}, but {name!r} has {rank} dimensions")
    named = [dim for dim in given if dim is not None]
    if len(set(named)) < len(named) or any(not isinstance(d, str) or d in _SAMPLE_DIMS for d in named):
        raise ArgumentError(
            f"dims[{name!r}] = {given!r}: names of dimensions are different strings, not 'chain' or 'draw'; None "
            "leaves one its usual name"
        )


def safe_name(name: str) -> str:
    """Return the name without slashes, which would become groups of the file."""
    return name.replace("/", ".")


def close_names(name: object, names: Iterable[str]) -> list[str]:
    """Return the names most like ``name``; the first ten where none is."""
    known = list(names)
    return difflib.get_close_matches(str(name), known, n=3, cutoff=0.4) or known[:10]


def listed(option: str, names: str | Sequence[str]) -> list[str]:
    """Return one name or several as a list.

    Raises:
        ArgumentError: anything else.
    """
    found = [names] if isinstance(names, str) else names
    if not isinstance(found, (list, tuple)) or not all(isinstance(name, str) for name in found):
        raise ArgumentError(f"{option} is a name or a list of names, not {names!r}")
    return list(found)


def plate_names(node: Any, shape: Sequence[int]) -> list[str | None]:
    """Name the dimensions of a site's value after its plates.

    Args:
        node: the site in a trace of the model.
        shape: of its value.

    Returns:
        one entry a dimension, None where no plate is responsible.
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
    """Return the values on the CPU, half precision as single, truth values as 0 and 1."""
    return array_of(value.to(torch.int8) if value.dtype == torch.bool else value)


def joined(pieces: list[np.ndarray], axis: int) -> np.ndarray:
    """Concatenate along ``axis`` and empty the list on the way, so that nothing is held twice."""
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
    groups: Mapping[str, Group], attributes: Mapping[str, Any], coords: Mapping[str, Coords], dims: Dims
) -> Any:
    """Return ``InferenceData`` with ArviZ 0.x, ``xarray.DataTree`` with ArviZ 1.x.

    Args:
        groups: groups by name; empty ones are left out.
        attributes: of the whole object; the time and the versions of the libraries are added.
        coords: the user's coordinates by group.
        dims: the user's names of dimensions by variable.
    """
    with warnings.catch_warnings():
        # ArviZ 0.23 announces version 1 whenever it is imported; both versions are supported here.
        warnings.filterwarnings(
            "ignore", message=r"\s*ArviZ is undergoing a major refactor", category=FutureWarning
        )
        import arviz

    attributes = {**provenance(), **attributes}
    if groups["observed_data"].arrays and not groups["log_likelihood"].arrays:
        attributes.setdefault(
            "log_likelihood_left_out",
            "the predictive distribution is the same for every draw, so that az.loo has nothing to reweight: compare "
            "predictions of held-out data by diagnostics.compare_held_out. A posterior that was trained by samples has "
            "one if it is exported with method=Samples(500)",
        )
    for name in (
        "posterior_predictive",
        "prior_predictive",
    ):  # ArviZ plots real numbers and others in unlike ways
        arrays = groups[name].arrays if name in groups else {}
        for site, values in groups["observed_data"].arrays.items():
            if site in arrays and values.dtype.kind == "f" != arrays[site].dtype.kind:
                arrays[site] = arrays[site].astype(values.dtype)
    is_tree = int(arviz.__version__.split(".")[0]) >= 1
    leading = "sample_dims" if is_tree else "default_dims"
    datasets = {}
    for name, group in groups.items():
        if not group.arrays:
            continue
        named = group.dims(dims)
        datasets[name] = arviz.dict_to_dataset(
            group.arrays,
            dims=named,
            coords=group.coordinates(named, coords.get(name, {})),
            **{leading: ["chain", "draw"] if group.sampled else []},
        )
    if not is_tree:
        return arviz.InferenceData(attrs=dict(attributes), **datasets)
    from xarray import DataTree

    tree = DataTree.from_dict(datasets)
    tree.attrs.update(attributes)
    return tree


@Prediction.exported_by
def of_prediction(prediction: Prediction, num_samples: int, seed: int | None) -> Any:
    """Return a prediction as the object of ArviZ; see :meth:`~pyro_dvi.predictive.Prediction.to_arviz`."""
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


def provenance() -> dict[str, str]:
    """Return the time and the versions of the libraries, as ArviZ calls them."""
    return {
        "created_at": datetime.now(UTC).isoformat(),
        "inference_library": "pyro_dvi",
        "inference_library_version": version("pyro-dvi"),
        "pyro_version": pyro.__version__,
        "torch_version": str(torch.__version__),
    }
