# SPDX-License-Identifier: Apache-2.0
"""Build the object of whichever ArviZ is installed: the only place that knows its versions."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from pyro_dvi.analysis.inference_data.group import Coords, Dims, Group, as_array
from pyro_dvi.analysis.inference_data.records import provenance
from pyro_dvi.predictive import Prediction
from pyro_dvi.predictive.batch_prediction import with_any


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
    """Return a prediction as the object of ArviZ; see :meth:`~pyro_dvi.Prediction.to_arviz`."""
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
