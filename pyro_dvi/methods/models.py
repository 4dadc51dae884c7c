# SPDX-License-Identifier: Apache-2.0
"""The Pyro model of a network and its data."""

import copy
from collections.abc import Iterable
from typing import Any

from pyro.nn.module import PyroModule
from torch import Tensor, nn

from pyro_dvi.bayesian import classifier, regressor, to_bayesian_
from pyro_dvi.bayesian.converted import was_converted
from pyro_dvi.bayesian.likelihoods import LikelihoodModule
from pyro_dvi.core.batches import arguments, dataset_size
from pyro_dvi.errors import DataError


def is_network(model: Any) -> bool:
    """Return whether a model is a torch module without a likelihood, with or without priors."""
    if not isinstance(model, nn.Module) or isinstance(model, LikelihoodModule):
        return False
    return not isinstance(model, PyroModule) or was_converted(model)


def as_model(model: Any, loader: Iterable[Any], prior_scale: Any, noise_scale: Any) -> Any:
    """Return a Pyro model: a copy of the one that is given, or of a network with priors and the likelihood of its data.

    Integer targets are labels, others get Normal noise.
    """
    model = copy.deepcopy(model) if isinstance(model, nn.Module) else model
    if not is_network(model):
        return model
    size, sizes = dataset_size(loader), list[int]()
    args: tuple[Any, ...] = ()
    for batch in loader:
        args, _ = arguments(batch, None)
        sizes.append(len(args[-1]) if len(args) == 2 and isinstance(args[1], Tensor) else 0)
        if size is not None:
            break
    if not sizes or not all(sizes):
        raise DataError(
            "a network needs batches (inputs, targets), labels or numbers: for other batches write a Pyro model, as "
            "def model(x, y=None), and pass it in place of the network"
        )
    if not was_converted(model):
        to_bayesian_(model, prior_scale)
    num_data = size or sum(sizes)
    return (
        regressor(model, num_data, noise_scale)
        if args[1].is_floating_point()
        else classifier(model, num_data)
    )
