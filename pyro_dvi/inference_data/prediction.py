# SPDX-License-Identifier: Apache-2.0
"""Export of a prediction that was made before."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pyro_dvi.errors import ArgumentError, UnsupportedError
from pyro_dvi.inference_data.arrays import as_array, joined
from pyro_dvi.inference_data.assemble import assemble
from pyro_dvi.inference_data.attributes import provenance
from pyro_dvi.inference_data.group import Group, check_names
from pyro_dvi.inference_data.names import safe_name
from pyro_dvi.predictive import Prediction
from pyro_dvi.predictive.run import seeded

__all__ = ["from_prediction"]


def from_prediction(
    prediction: Prediction,
    num_samples: int = 500,
    *,
    seed: int | None = None,
    coords: Mapping[Hashable, Any] | None = None,
    dims: Mapping[Hashable, Sequence[Hashable]] | None = None,
) -> Any:
    r"""Draws from predictive distributions as an ArviZ object, for plots of predictive checks.

    .. math:: \tilde y_{ik} \sim p(y \mid x_i)

    Groups: ``posterior_predictive`` with ``observed_data`` if the data held observations, ``predictions`` if not.
    Draws of different examples are independent, also where a draw of the weights would make them move together;
    :func:`~pyro_dvi.to_arviz` exports the posterior as well, and draws that share their weights.

    Args:
        prediction: what :func:`~pyro_dvi.predict` returned.
        num_samples: draws of every observation.
        seed: of the draws; by default one from the global generator, whose state is otherwise left as it was.
        coords: coordinate values by dimension, as in ArviZ.
        dims: names of the dimensions by variable, as in ArviZ.

    Returns:
        ``arviz.InferenceData`` or ``xarray.DataTree``, with the method, the seed and versions as attributes.

    Raises:
        ArgumentError: no prediction, no draws, or names that fit nothing.
        UnsupportedError: a mixture of distributions that the prediction did not keep.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> import pyro_dvi as dvi
        >>> def model(x, y=None):
        ...     slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(x)):
        ...         return pyro.sample("obs", dist.Normal(slope * x, 0.5), obs=y)
        >>> def guide(x, y=None):
        ...     pyro.sample("slope", dist.Normal(2.0, 0.1))
        >>> x = torch.linspace(-1, 1, 5)
        >>> exported = from_prediction(dvi.predict(model, guide, (x, 2 * x)), num_samples=50, seed=0)
        >>> exported["posterior_predictive"]["obs"].shape
        (1, 50, 5)
    """
    if not isinstance(prediction, Prediction):
        raise ArgumentError(
            f"from_prediction exports what predict returned, not a {type(prediction).__name__}"
        )
    if isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 1:
        raise ArgumentError(f"num_samples must be a positive whole number, not {num_samples!r}")
    site = prediction.site
    drawn: list[np.ndarray] = []
    parts = prediction._parts
    tensors = (parts[0].mean, parts[0].log_probabilities, parts[0].observed)
    device = next((tensor.device for tensor in tensors if tensor is not None), None)
    with seeded(seed, device) as used_seed, torch.no_grad():
        torch.manual_seed(used_seed)
        for part in parts:
            fn = part.distribution
            if fn is None:
                raise UnsupportedError(
                    f"the prediction at site {site!r} averages several {part.kind} distributions and kept none of "
                    "them to draw from: export with to_arviz(model, guide, data, method=...) instead"
                )
            values = fn.sample((num_samples,))
            drawn.append(as_array(values.movedim(part.axis - len(fn.event_shape), 1)))
    predictive = Group()
    predictive.add(site, joined(drawn, 1))
    groups = {"predictions": predictive}
    if prediction.observed is not None:
        observed = Group(sampled=False)
        observed.add(site, as_array(prediction.observed))
        groups = {"posterior_predictive": predictive, "observed_data": observed}
    names = {safe_name(str(name)): given for name, given in (dims or {}).items()}
    check_names(groups, names, coords or {}, ())
    attributes = {**provenance(used_seed), "method": repr(prediction.method)}
    return assemble(groups, attributes, dict.fromkeys(groups, coords or {}), names)
