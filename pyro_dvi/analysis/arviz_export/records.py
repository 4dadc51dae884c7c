# SPDX-License-Identifier: Apache-2.0
"""What is recorded beside the draws: inputs, the course of the training, how and by which versions it was exported."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_dvi.analysis.arviz_export.groups import Group, as_array, joined
from pyro_dvi.analysis.arviz_export.latent_draws import GivenSamples
from pyro_dvi.core.arguments import parameter_names
from pyro_dvi.errors import ArgumentError
from pyro_dvi.predictive import PredictionRule
from pyro_dvi.training import History

MAX_INPUT_VALUES = 1_000_000  # inputs with more values are not copied


def inputs_of(
    model: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], rows: str | None
) -> tuple[Group, list[str]]:
    """Join the inputs of all batches.

    Args:
        model: the Pyro model.
        inputs: its arguments in every batch; nested ones are named by their path, ``image.left``.
        rows: name of the dimension of examples, if known.

    Returns:
        The group, and the names of inputs that are too big to copy.
    """
    names = parameter_names(model, len(inputs[0]))
    pieces: dict[str, list[Tensor]] = {}
    for arguments in inputs:
        for name, argument in zip(names, arguments, strict=False):
            for path, tensor in _tensors(name, argument):
                pieces.setdefault(path, []).append(tensor)
    group, left_out = Group(sampled=False), []
    for path, tensors in pieces.items():
        if sum(t.numel() for t in tensors) > MAX_INPUT_VALUES:
            left_out.append(path)
        elif len(tensors) == len(inputs):
            group.add(path, joined([as_array(t) for t in tensors], 0), [rows])
    return group, left_out


def named_constants(given: Mapping[str, Any], rows: str | None, predicted: Group) -> Group:
    """Return variables that the user gives in place of the inputs.

    Args:
        given: arrays by name.
        rows: name of the dimension of examples, if known.
        predicted: draws of observations, which have that dimension; arrays of another length have not.
    """
    lengths = {predicted.shape(name)[:1] for name, dims in predicted.suggested.items() if dims[:1] == (rows,)}
    group = Group(sampled=False)
    for name, value in given.items():
        array = as_array(value) if isinstance(value, Tensor) else np.asarray(value)
        group.add(name, array, [rows] if array.shape[:1] in lengths else [])
    return group


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if torch.is_tensor(value):
        if value.dim() > 0:
            yield name, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _tensors(f"{name}.{key}", part)
    elif isinstance(value, (tuple, list)):
        for i, part in enumerate(value):
            yield from _tensors(f"{name}.{i}", part)


def training_group(history: History) -> Group:
    """Return the columns of the epochs along a dimension ``epoch``.

    A group of its own, not ``sample_stats``: epochs are no draws.

    Raises:
        ArgumentError: not what ``fit`` returned, or no epoch.
    """
    if not isinstance(history, History):
        raise ArgumentError(
            f"history must be what pyro_dvi.fit returned, not {type(history).__name__}: "
            "History.from_dict reads a saved one"
        )
    if not history.epochs.rows:
        raise ArgumentError("the history holds no finished epoch to export")
    group = Group(sampled=False)
    for name, column in history.epochs.items():
        if name != "epoch":
            group.add(name, np.asarray(column), ["epoch"])
    group.coords["epoch"] = np.asarray(history["epoch"], dtype=int)
    return group


def attributes(
    guide: Callable[..., Any], rule: PredictionRule, elbo: Any, history: History | None, seed: int
) -> dict[str, Any]:
    """Return guide, method, objective, KL weight and seed.

    The KL weight is that of the objective, else of the guide, else of the last epoch of the history.
    """
    is_given = isinstance(rule, GivenSamples)
    found: dict[str, Any] = {
        "guide": "samples" if is_given else getattr(guide, "__name__", type(guide).__name__),
        "method": repr(rule),
        "seed": seed,
    }
    if elbo is not None:
        found["elbo"] = type(elbo).__name__
    weight = _kl_weight(elbo, guide, history)
    if weight is not None:
        found["kl_weight"] = weight
    return found


def _kl_weight(elbo: Any, guide: Any, history: History | None) -> float | str | None:
    weight = getattr(elbo, "kl_weight", None)
    if callable(weight):  # a schedule: what it last gave
        weight = (getattr(elbo, "terms", None) or {}).get("kl_weight", repr(weight))
    if weight is None:
        weight = getattr(guide, "kl_weight", None)
    if weight is None and history is not None:
        weight = history.epochs.last().get("kl_weight")
    return weight if weight is None or isinstance(weight, str) else float(weight)
