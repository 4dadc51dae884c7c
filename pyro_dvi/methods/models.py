# SPDX-License-Identifier: Apache-2.0
"""The Pyro model for a network and its data."""

import copy
from collections.abc import Iterable
from itertools import chain, islice
from typing import Any

import torch
from pyro.nn.module import PyroModule
from torch import Tensor, nn

from pyro_dvi.bayesian import classifier, regressor, to_bayesian_
from pyro_dvi.bayesian.converted import was_converted
from pyro_dvi.bayesian.likelihoods import LikelihoodModule
from pyro_dvi.bayesian.selection import NORM_LAYERS
from pyro_dvi.core.batches import arguments, check_loader, dataset_size, with_rows
from pyro_dvi.core.in_turn import in_turn
from pyro_dvi.errors import ArgumentError, DataError, ModelError, warn

Loader = Iterable[Any]


def is_network(model: Any) -> bool:
    """Return whether a model is a torch module without a likelihood; it may have priors."""
    is_model = isinstance(model, LikelihoodModule) or (
        isinstance(model, PyroModule) and not was_converted(model)
    )
    return isinstance(model, nn.Module) and not is_model


def as_model(model: Any, loader: Loader, method: Any, trains: bool = True) -> Any:
    """Return a copy of a Pyro model, or a Pyro model that consists of a copy of a network, priors and a likelihood.

    For a network, integer targets are treated as labels; other targets get Normal noise. A network that is to be
    trained is warned of inputs that are not scaled. The method has the priors, the noise, and ``standardize``.
    """
    if is_network(plain := getattr(model, "_orig_mod", None)):
        model = plain  # of a network from torch.compile
    if not callable(model):
        raise ArgumentError(f"the model is a {type(model).__name__}: pass a network first, then a loader")
    try:
        model = copy.deepcopy(model) if isinstance(model, nn.Module) else model
    except TypeError as error:
        how = "open files and connections in a function that forward calls, or train the model itself with dvi.fit"
        raise ModelError(f"the model cannot be copied ({error}): {how}") from error
    if not is_network(model):
        if method.standardize:
            raise ArgumentError(
                "standardize=True needs a network: a Pyro model standardises its observations itself"
            )
        return model
    check_loader(loader, 2)
    size = dataset_size(loader)
    seen = islice(in_turn.passed_for(loader), None if size is None or method.standardize else 1)
    first = list(islice(seen, 1))
    targets = list(map(target_of, chain(first, seen)))
    if not targets or not all(isinstance(target, Tensor) and target.dim() for target in targets):
        raise DataError(
            "batches for a network must be (inputs, targets), ((a, b), targets) for several inputs, or mappings with "
            "its arguments and 'labels'. Targets are a tensor (of an array, torch.as_tensor(y)) with one row for each "
            "example (of a single example, y[None]). For other data, pass a Pyro model, def model(x, y=None)"
        )
    inputs = with_rows([value for value in arguments(first[0], None)[0][:1] if isinstance(value, Tensor)])
    if inputs is not None:
        _look_at_inputs(model, inputs, targets[0], trains)
    if not was_converted(model):
        to_bayesian_(model, method.prior_scale)
    num_data = size or sum(map(len, targets))
    if targets[0].is_floating_point():
        found = regressor(model, num_data, method.noise_scale)
        if method.standardize and not trains:
            raise ArgumentError(
                "standardize=True needs epochs: a trained network predicts in units of its own"
            )
        if method.standardize:
            found.standardize(torch.cat(targets))
        else:
            _look_at(targets[0], method.prior_scale)
        return found
    if method.standardize:
        raise ArgumentError("standardize=True is for regression, but the targets are labels")
    return classifier(model, num_data)


def _look_at(numbers: Tensor, prior_scale: Any) -> None:
    """Warn if targets look like labels, or if their size does not suit the default priors, noise and step sizes."""
    size = float(numbers.square().mean().sqrt())
    spread = float(numbers.std(0).min()) if len(numbers) >= 10 else 1.0
    if bool((numbers * (numbers - 1) == 0).all()):
        one_hot = bool((numbers.sum(-1) == 1).all())
        several = "y.argmax(1)" if one_hot else "a Pyro model with dist.Bernoulli(logits=net(x)).to_event(1)"
        hint = several if numbers[0].numel() > 1 else "y.long()"
        warn(f"all targets are 0.0 or 1.0, but get Normal noise: if they are labels, pass {hint}")
    elif prior_scale in (0.5, 1.0) and (size < 0.1 or size > 10 or spread < 0.1):
        warn(
            f"the root mean square of the targets is {size:.3g}, and their mean {float(numbers.mean()):.3g}, but the "
            "default priors, noise and step sizes are for a mean of about 0 and a standard deviation of about 1. "
            "Standardise the targets (the method's standardize=True does so), or predictions may be far off"
        )


def _look_at_inputs(net: nn.Module, x: Tensor, y: Tensor, trains: bool) -> None:
    """Refuse a single example, and warn if inputs are so large that the network would not train."""
    if x.dim() == 1 and len(x) != len(y):
        raise DataError(
            f"x has the shape {tuple(x.shape)}, y {tuple(y.shape)}: pass an example as x[None], y[None]"
        )
    first = next(module for module in net.modules() if not list(module.children()))
    if trains and x.numel() and x.is_floating_point() and not isinstance(first, NORM_LAYERS):
        size = x.reshape(len(x), -1).float().square().mean(0).sqrt()
        if (largest := float(size.max())) > 30:
            warn(
                f"column {int(size.argmax())} of the inputs has the root mean square {largest:.3g}, but default priors "
                "and step sizes are for inputs of size about 1. Standardise each column, (x - x.mean(0)) / x.std(0)"
            )


def target_of(batch: Any) -> Any:
    """Return the targets of a batch; None unless there is exactly one."""
    args, named = arguments(batch, None)
    return named.get("labels", named.get("y")) if named else args[1] if len(args) == 2 else None
