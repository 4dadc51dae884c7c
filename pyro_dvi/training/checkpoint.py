# SPDX-License-Identifier: Apache-2.0
"""One file with everything that a run needs to go on after an epoch as if it had never stopped; no data are in it."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

import pyro
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pyro_dvi.core.arguments import check_choice, check_count
from pyro_dvi.core.batches import arguments
from pyro_dvi.errors import CheckpointError, GuideError, ModelError
from pyro_dvi.runs.fingerprint import Fingerprint, central_values, stand_ins
from pyro_dvi.runs.trained_for import note_trained_for
from pyro_dvi.training.checkpoint_file import first_line, read_file, write_file
from pyro_dvi.training.history import History
from pyro_dvi.training.parameter_checks import check_parameters
from pyro_dvi.training.random_state import (
    check_generators,
    preserve_random_state,
    random_state,
    restore_random_state,
)
from pyro_dvi.training.routes import Route, route_of

_WAYS_OUT = {
    "the modules ": ": a model or guide is a module or a function as before, and modules= the same as for save.",
    "kl_weight=": "; to go on with another weight, set elbo.kl_weight after load.",
}


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

    def check_covers(self, called: Iterable[nn.Module]) -> None:
        """Refuse modules with buffers that a model which is a function calls, and which the file would not hold.

        Raises:
            ModelError: naming one.
        """
        covered = {id(module) for part in self.modules.values() for module in part.modules()}
        for module in (module for part in called for module in part.modules()):
            if id(module) not in covered and any(True for _ in module.buffers(recurse=False)):
                raise ModelError(
                    f"The model is a function that calls {type(module).__name__}, whose buffers a checkpoint does not "
                    "see: pass Checkpoint(path, modules={'net': net})."
                )


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

    The file holds tensors, numbers and Pyro's constraints only: :func:`load` runs no code from it. It holds no data.
    With a history of :func:`~pyro_dvi.training.fit` it holds the shapes and dtypes of the first batch, by which
    :func:`load` initialises the guide, and a summary of the model at made-up inputs of these shapes, by which it
    recognises the model; neither for batches of anything but dense tensors in tuples, lists and dictionaries.

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
        ArgumentError: if ``svi`` is neither of the two, or ``history`` is none.
        CheckpointError: if the file cannot be written.
    """
    history = History() if history is None else history
    check_choice("history", history, History, "the one that fit returned")
    route, extra = route_of(svi, optimizer, train=False), modules or {}
    parts = {**route.modules(), **extra}
    fingerprint = None
    if history.inputs is not None:
        args, kwargs = stand_ins(*history.inputs, route.device())
        with preserve_random_state():
            centre = central_values(route.guide, args, kwargs)
            fingerprint = Fingerprint.of(route.model, args, kwargs, centre)
    own, constraints = route.store_parameters(), pyro.get_param_store()._constraints
    held = {
        id(value): [role, name] for role, part in extra.items() for name, value in part.named_parameters()
    }
    content = {
        "described": _described(route, parts),
        "states": {role: part.state_dict() for role, part in parts.items()},
        "store": {
            "params": {name: value.detach().clone() for name, value in own.items()},
            "constraints": {name: constraints[name] for name in own},
            # pyro.module puts a network's own parameters into the store, and there they must be the same tensors.
            "aliases": {name: held[id(value)] for name, value in own.items() if id(value) in held},
        },
        "elbo": route.elbo.state_dict() if hasattr(route.elbo, "state_dict") else None,
        "optimizer": route.optimizer_state(),
        "lr_schedule": None if lr_schedule is None else lr_schedule.state_dict(),
        "random": random_state(loader),
        "history": history.to_dict(),
        "best_weights": history.best_weights,
        "inputs": history.inputs,
        "fingerprint": fingerprint and fingerprint.state(),
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
    and the priors, plates, noise and outputs of the model. To go on, pass the result:
    ``fit(svi, loader, epochs, history=load(path, svi, loader=loader))``. On the CPU this gives the very numbers of a
    run that was never stopped, if the file was saved after an epoch.

    Args:
        path: file to read.
        svi: built as it was for the run that was saved; likewise the other objects.
        optimizer: torch optimizer of an ``ELBOModule``. None leaves the optimizer out, to predict only.
        lr_schedule: a torch scheduler that was saved along.
        loader: the training loader, to restore its generator. None leaves that out.
        modules: as for :func:`save`.
        example: one batch, for a file without shapes of batches. Pyro's own automatic guides have no parameters before
            they have seen one, and a function has not put its networks into Pyro's store.
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
    parts = {**route.modules(), **(modules or {})}
    saved = read_file(Path(path), map_location, weights_only)
    if best and saved["best_weights"] is None:
        raise CheckpointError("The checkpoint holds no best weights: early stopping did not watch this run.")
    _check(saved, route, parts)
    if lr_schedule is not None and saved["lr_schedule"] is None:
        raise CheckpointError("The checkpoint holds no learning rate schedule; leave out lr_schedule.")
    if restore_random and loader is not None:
        check_generators(saved["random"], loader)
    if example is not None:
        route.initialise(*arguments(example, route.device()))
    elif saved["inputs"] is not None:
        try:
            with preserve_random_state():
                args, kwargs = saved["inputs"]
                route.initialise(*stand_ins(args, kwargs, route.device()))
        except Exception as error:
            raise CheckpointError(
                "The checkpoint belongs to another model or guide, which do not run on inputs of the shapes in the "
                f"file ({first_line(error)}); if they are the same, pass example=, one batch of the loader."
            ) from error
    _load_weights(saved, route, parts)
    note_trained_for(route.guide, getattr(route.elbo, "prediction_rule", "Samples"))
    if saved["elbo"] is not None:
        route.elbo.load_state_dict(saved["elbo"])
    if route.steered is not None:
        try:
            route.load_optimizer_state(saved["optimizer"])
        except (ValueError, KeyError) as error:
            raise CheckpointError(
                f"The optimizer's state does not fit: {error}. Build it as it was built."
            ) from error
        if hasattr(route.elbo, "prepare"):  # for a loop of the user's own
            route.elbo.prepare(route.guide, route.steered)
    if lr_schedule is not None:
        lr_schedule.load_state_dict(saved["lr_schedule"])
    history = History.from_dict(saved["history"])
    history.best_weights, history.inputs = saved["best_weights"], saved["inputs"]
    if best:
        route.set_weights(saved["best_weights"])
    if restore_random:
        restore_random_state(saved["random"], loader)
    return history


def _check(saved: Mapping[str, Any], route: Route, parts: Mapping[str, nn.Module]) -> None:
    """Refuse a file of other objects, as far as these can be known before the model has run."""
    for what, now in _described(route, parts).items():
        before = saved["described"][what]
        if before != now and None not in (before, now):
            raise CheckpointError(
                f"The checkpoint was trained with {what}{before}, the target has {now}. Build it as it was"
                f"{_WAYS_OUT.get(what, '.')}"
            )
    check_parameters(route)
    for role, module in parts.items():
        if role != "guide":
            _check_state(role, module.state_dict(), saved["states"][role])


def _described(route: Route, parts: Mapping[str, nn.Module]) -> dict[str, Any]:
    """Return what file and target have to agree in, by the words of a message; None is not compared."""
    elbo = getattr(route.elbo, "elbo", route.elbo)  # whether one process evaluates it or several
    weight = getattr(elbo, "kl_weight", None)
    if is_dataclass(weight):
        weight = repr(weight)
    elif weight is not None:
        weight = None if callable(weight) else float(weight)
    return {
        "": route.kind,
        "the modules ": sorted(parts),
        # The scales of two guides may have the same names and shapes, but one stores their logarithm.
        "the guide ": type(route.guide).__name__,
        "the objective ": type(elbo).__name__,
        "kl_weight=": weight,
        "the optimizer ": None if route.steered is None else route.optimizer_name,
    }


def _load_weights(saved: Mapping[str, Any], route: Route, modules: Mapping[str, nn.Module]) -> None:
    """Load modules and Pyro's store; put them back if the model is then another one than that of the file."""
    states, stored = saved["states"], saved["store"]
    if "guide" in modules and next(modules["guide"].parameters(), None) is not None:
        _check_state("guide", modules["guide"].state_dict(), states["guide"])
    store = pyro.get_param_store()
    existing = {name: value for name, value in store.named_parameters() if name in stored["params"]}
    _check_state("parameter store", existing, {name: stored["params"][name] for name in existing})
    new = {
        name: _new_parameter(name, value, stored["aliases"], modules)
        for name, value in stored["params"].items()
        if name not in existing
    }
    before = route.weights()
    # Of all that is written now, a fresh guide is the likeliest to refuse: it goes first.
    for role in sorted(modules, key=lambda role: role != "guide"):
        _load_state(role, modules[role], states[role])
    with torch.no_grad():
        for name, value in existing.items():
            value.copy_(stored["params"][name])
    store.set_state({"params": new, "constraints": {name: stored["constraints"][name] for name in new}})
    if saved["fingerprint"] is None:
        return
    fingerprint = Fingerprint(**saved["fingerprint"])
    args, kwargs = saved["inputs"]
    centre = central_values(route.guide, *stand_ins(args, kwargs, route.device()))
    differences = fingerprint.differences(route.model, centre)
    if differences:
        route.set_weights(before)
        raise CheckpointError(
            f"The checkpoint belongs to another model: {differences} (saved → now, in evaluation mode, at the "
            "centre of the posterior). Build the model as it was, with attributes that training moves (annealed "
            "noise, a plate that grows) as they were when it was saved; or start from the weights alone: "
            "guide.load_state_dict(...)."
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
    except (RuntimeError, KeyError, GuideError) as error:
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
