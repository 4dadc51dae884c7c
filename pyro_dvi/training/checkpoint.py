# SPDX-License-Identifier: Apache-2.0
"""One file with everything that a run needs to go on as if it had never stopped."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

import pyro
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pyro_dvi.batches import arguments
from pyro_dvi.choice import check_count
from pyro_dvi.errors import CheckpointError
from pyro_dvi.handlers.fingerprint import Fingerprint, central_values
from pyro_dvi.handlers.trained_for import note_trained_for
from pyro_dvi.training.checkpoint_file import first_line, read_file, write_file
from pyro_dvi.training.history import History
from pyro_dvi.training.ownership import check_parameters
from pyro_dvi.training.random_state import (
    check_generators,
    preserve_random_state,
    random_state,
    restore_random_state,
)
from pyro_dvi.training.routes import Route, route_of
from pyro_dvi.training.snapshot import copy_weights, restore_weights

__all__ = ["Checkpoint", "fingerprint_of", "load", "save", "write"]


def fingerprint_of(route: Route, args: Any, kwargs: Any, known: Any = None) -> Fingerprint | None:
    """Take the fingerprint of a model at the centre of its guide; no random numbers are used up."""
    with preserve_random_state():
        return Fingerprint.of(route.model, args, kwargs, central_values(route.guide, args, kwargs), known)


@dataclass(frozen=True)
class Checkpoint:
    """Where and how often :func:`~pyro_dvi.training.fit` saves.

    Args:
        path: file to write; replaced in one move, so that a crash leaves the last complete one.
        every: epochs between two saves. The last epoch and an interrupted run are always saved.
        modules: modules with buffers (BatchNorm) that a model which is a function calls, by a name of your choice.

    Raises:
        ArgumentError: if ``every`` is not a positive integer.
    """

    path: str | os.PathLike[str]
    every: int = 1
    modules: Mapping[str, nn.Module] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_count("Checkpoint: every", self.every)


def save(
    path: str | os.PathLike[str],
    svi: Any,
    *,
    optimizer: Optimizer | None = None,
    lr_schedule: Any = None,
    history: History | None = None,
    loader: Any = None,
    modules: Mapping[str, nn.Module] | None = None,
) -> None:
    """Save model, guide, ELBO, optimizer, parameter store, random state and history in one file.

    The file holds tensors, numbers and Pyro's constraints only: :func:`load` runs no code from it. With a history of
    :func:`~pyro_dvi.training.fit` it also holds four rows of the training data and what the model says about them, by
    which :func:`load` recognises the model. Of a model that does not run on four rows it holds one batch of up to a
    million numbers, and nothing of a larger one, or of batches with other things than dense tensors and plain values in
    tuples, lists and dictionaries.

    Args:
        path: file to write.
        svi: an ``SVI``, or what ``elbo(model, guide)`` returns.
        optimizer: the torch optimizer of the latter.
        lr_schedule: a torch scheduler to save along.
        history: what :func:`~pyro_dvi.training.fit` returned.
        loader: the training loader; the state of its ``generator`` is saved, so that shuffling goes on as it would.
        modules: modules whose buffers no module of ``svi`` lists, by a name of your choice: networks that a model
            which is a function calls.

    Raises:
        ArgumentError: if ``svi`` is neither of the two.
        CheckpointError: if the file cannot be written.
    """
    route = route_of(svi, optimizer, train=False)
    write(path, route, lr_schedule=lr_schedule, history=history, loader=loader, modules=modules or {})


def write(
    path: str | os.PathLike[str],
    route: Route,
    *,
    lr_schedule: Any,
    history: History | None,
    loader: Any,
    modules: Mapping[str, nn.Module],
) -> None:
    """Write the checkpoint of a route; see :func:`save`."""
    store = pyro.get_param_store()
    own = route.store_parameters()
    last = None if history is None else history.fingerprint
    fingerprint = last and fingerprint_of(route, *last.placed(route.device()), last.sites)
    held = {
        id(value): [role, name] for role, part in modules.items() for name, value in part.named_parameters()
    }
    elbo_state = route.elbo.state_dict() if hasattr(route.elbo, "state_dict") else None
    content = {
        "route": route.kind,
        "guide": type(route.guide).__name__,
        "states": {role: part.state_dict() for role, part in {**route.modules(), **modules}.items()},
        "store": {
            "params": {name: value.detach().clone() for name, value in own.items()},
            "constraints": {name: store._constraints[name] for name in own},
            # pyro.module puts a network's own parameters into the store, and there they must be the same tensors.
            "aliases": {name: held[id(value)] for name, value in own.items() if id(value) in held},
        },
        "elbo": {"type": _elbo_name(route.elbo), "state": elbo_state, "kl_weight": _kl_weight(route.elbo)},
        "optimizer": {"type": route.optimizer_name, "state": route.optimizer_state()},
        "lr_schedule": None if lr_schedule is None else lr_schedule.state_dict(),
        "random": random_state(loader),
        "history": None if history is None else history.to_dict(),
        "best_weights": None if history is None else history.best_weights,
        "unfinished": None if history is None else history.unfinished,
        "fingerprint": None if fingerprint is None else fingerprint.state(),
    }
    write_file(Path(path), content)


def load(
    path: str | os.PathLike[str],
    svi: Any,
    *,
    optimizer: Optimizer | None = None,
    lr_schedule: Any = None,
    loader: Any = None,
    modules: Mapping[str, nn.Module] | None = None,
    example: Any = None,
    best: bool = False,
    restore_random: bool = True,
    weights_only: bool = True,
    map_location: Any = None,
) -> History:
    """Load what :func:`save` wrote into freshly built objects, and return the history.

    Nothing is changed unless model, guide, ELBO and optimizer are seen to fit: their types, parameters and KL weight,
    and on the rows in the file the priors, plates, noise and outputs of the model. To go on, pass the result:
    ``fit(svi, loader, epochs, history=load(path, svi, loader=loader))``. On the CPU this gives the very numbers of a
    run that was never stopped.

    Args:
        path: file to read.
        svi: built as it was for the run that was saved; likewise the other objects.
        optimizer: torch optimizer of an ``ELBOModule``. None leaves the optimizer out, to predict only.
        lr_schedule: a torch scheduler that was saved along.
        loader: the training loader, to restore its generator. None leaves that out.
        modules: as for :func:`save`.
        example: one batch. Pyro's own automatic guides have no parameters before they have seen one, and a function
            has not put its networks into Pyro's store. Not needed where the file holds rows of the data.
        best: load the weights of the best epoch (see ``EarlyStopping``) instead of the last.
        restore_random: whether to restore the random generators.
        weights_only: read tensors and plain values only. False also reads a state with objects of your own (a learning
            rate schedule, a constraint) and, as ``torch.load``, then runs code from the file: for files you trust.
        map_location: as for :func:`torch.load`.

    Raises:
        CheckpointError: if the file is missing, truncated or foreign, or does not fit the objects; keys are named.
        GuideError: if Pyro's store holds parameters of another guide under the same names.
    """
    route = route_of(svi, optimizer, train=False)
    content = read_file(Path(path), map_location, weights_only)
    modules = {**route.modules(), **(modules or {})}
    _check_kind(content, route, set(modules), with_optimizer=optimizer is not None or route.kind == "SVI")
    check_parameters(route)
    if lr_schedule is not None and content["lr_schedule"] is None:
        raise CheckpointError("The checkpoint holds no learning rate schedule; leave out lr_schedule.")
    if best and content["best_weights"] is None:
        raise CheckpointError("The checkpoint holds no best weights: early stopping did not watch this run.")
    # Without a loader there is no generator to restore; with one, its generators must be those of the file.
    random = content["random"] if loader is not None else {**content["random"], "loaders": []}
    if restore_random:
        check_generators(random, loader)
    states = content["states"]
    for role in modules:
        if role != "guide":
            _check_state(role, modules[role].state_dict(), states[role])
    stored = content.get("fingerprint")  # as "unfinished", not in version 1 of the format
    fingerprint = None if stored is None else Fingerprint(**stored)
    if example is not None:
        route.initialise(*arguments(example, route.device()))
    elif fingerprint is not None:
        try:
            with preserve_random_state():
                route.initialise(*fingerprint.placed(route.device()))
        except Exception as error:
            raise CheckpointError(
                "The checkpoint belongs to another model or guide, which do not run on the rows of data in the file "
                f"({first_line(error)})"
            ) from error
    if "guide" in modules and next(modules["guide"].parameters(), None) is not None:
        own = modules["guide"].state_dict()
        if content["version"] == 1 and "_extra_state" not in states["guide"]:
            own.pop("_extra_state", None)  # the rule of prediction, which those files do not hold
        _check_state("guide", own, states["guide"])
    store = pyro.get_param_store()
    saved = content["store"]
    existing = {name: value for name, value in store.named_parameters() if name in saved["params"]}
    _check_state("parameter store", existing, {name: saved["params"][name] for name in existing})

    new = {
        name: _new_parameter(name, value, saved["aliases"], modules)
        for name, value in saved["params"].items()
        if name not in existing
    }

    before = copy_weights(route)
    # Of all that is written now, a fresh guide is the likeliest to refuse: it goes first.
    for role in sorted(modules, key=lambda role: role != "guide"):
        _load_state(role, modules[role], states[role])
    with torch.no_grad():
        for name, value in existing.items():
            value.copy_(saved["params"][name])
    store.set_state({"params": new, "constraints": {name: saved["constraints"][name] for name in new}})
    if fingerprint is not None:
        inputs = fingerprint.placed(route.device())
        differences = fingerprint.differences(route.model, central_values(route.guide, *inputs))
        if differences:
            restore_weights(route, before)
            raise CheckpointError(
                f"The checkpoint belongs to another model: {differences} (saved → now, in evaluation mode, at the "
                "centre of the posterior). Build the model as it was, with attributes that training moves (annealed "
                "noise, a plate that grows) as they were when it was saved; or start from the weights alone: "
                "guide.load_state_dict(...)."
            )
    note_trained_for(route.guide, getattr(route.elbo, "trains_for", "Samples"))
    if content["elbo"]["state"] is not None:
        route.elbo.load_state_dict(content["elbo"]["state"])
    if optimizer is not None or route.kind == "SVI":
        try:
            route.load_optimizer_state(content["optimizer"]["state"])
        except (ValueError, KeyError) as error:
            raise CheckpointError(
                f"The optimizer's state does not fit: {error}. Build it as it was built."
            ) from error
    if route.steered is not None and hasattr(route.elbo, "serve"):  # for a loop of the user's own
        route.elbo.serve(route.steered)
    if lr_schedule is not None:
        lr_schedule.load_state_dict(content["lr_schedule"])
    history = History() if content["history"] is None else History.from_dict(content["history"])
    history.best_weights = content["best_weights"]
    history.unfinished = content.get("unfinished")
    history.fingerprint = fingerprint
    if best:
        restore_weights(route, content["best_weights"])
    if restore_random:
        restore_random_state(random, loader)
    return history


def _elbo_name(elbo: Any) -> str:
    """Name of the objective, whether one process evaluates it or several."""
    return type(getattr(elbo, "elbo", elbo)).__name__


def _kl_weight(elbo: Any) -> float | str | None:
    """The weight of the KL in plain values; None for a function, which cannot be compared."""
    weight = getattr(elbo, "kl_weight", None)
    if is_dataclass(weight):
        return repr(weight)
    return None if weight is None or callable(weight) else float(weight)


def _check_kind(content: dict[str, Any], route: Route, roles: set[str], with_optimizer: bool) -> None:
    if content["route"] != route.kind:
        raise CheckpointError(
            f"The checkpoint was saved from an {content['route']}, but the target is an {route.kind}. Build the same "
            "kind of object."
        )
    saved = set(content["states"])
    if saved != roles:
        raise CheckpointError(
            f"The checkpoint holds modules {sorted(saved)}, the objects given are {sorted(roles)}. A model or guide "
            "must be a module or a function as it was, and modules= the same as for save."
        )
    # The scales of two guides may have the same names and shapes, but one stores their logarithm.
    if content["guide"] != type(route.guide).__name__:
        raise CheckpointError(
            f"The checkpoint does not fit the guide: it holds a {content['guide']}, the target has a "
            f"{type(route.guide).__name__}."
        )
    elbo, optimizer = content["elbo"]["type"], content["optimizer"]["type"]
    if elbo != _elbo_name(route.elbo):
        raise CheckpointError(
            f"The checkpoint was trained with {elbo}, the target has {_elbo_name(route.elbo)}."
        )
    weights = content["elbo"].get("kl_weight"), _kl_weight(route.elbo)
    if None not in weights and weights[0] != weights[1]:
        raise CheckpointError(
            f"The checkpoint was trained with kl_weight={weights[0]}, the target has {weights[1]}. Build it as it "
            "was; to go on with another weight, set elbo.kl_weight after load."
        )
    if with_optimizer and optimizer != route.optimizer_name:
        raise CheckpointError(
            f"The checkpoint was trained with {optimizer}, the target has {route.optimizer_name}."
        )


def _check_state(role: str, current: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    missing, unexpected = sorted(set(current) - set(saved)), sorted(set(saved) - set(current))
    if missing or unexpected:
        raise CheckpointError(
            f"The checkpoint does not fit the {role}: missing keys {missing[:5]}, unexpected keys {unexpected[:5]} "
            f"({len(missing)} and {len(unexpected)} in all). Build the {role} as it was built when it was saved."
        )
    for name, value in saved.items():
        own = current[name]
        if not isinstance(value, Tensor) or not isinstance(own, Tensor):
            continue
        if value.shape != own.shape or value.dtype != own.dtype:
            raise CheckpointError(
                f"The checkpoint does not fit the {role}: {name!r} is {tuple(value.shape)} {value.dtype} in the file "
                f"and {tuple(own.shape)} {own.dtype} in the {role}."
            )


def _load_state(role: str, module: nn.Module, state: Mapping[str, Any]) -> None:
    try:
        module.load_state_dict(state)
    except (RuntimeError, KeyError) as error:
        fresh = role == "guide" and next(module.parameters(), None) is None
        way_out = (
            f"{type(module).__name__} has no parameters before its first call: pass example=, one batch of the loader."
            if fresh
            else f"Build the {role} as it was built when it was saved."
        )
        raise CheckpointError(
            f"The checkpoint does not fit the {role}. {way_out} ({first_line(error)})"
        ) from error


def _new_parameter(
    name: str, value: Tensor, aliases: Mapping[str, Any], modules: Mapping[str, nn.Module]
) -> Tensor:
    """The tensor that Pyro's store will hold under ``name``: a module's own where there is one."""
    if name in aliases:
        role, parameter = aliases[name]
        return modules[role].get_parameter(parameter)
    if "$$$" in name:
        raise CheckpointError(
            f"The checkpoint holds {name!r} of pyro.module(...), whose network is not known here, and would train a "
            "copy of it: pass example=, one batch of the loader, or the network to save and load as modules={...}."
        )
    return value.requires_grad_()
