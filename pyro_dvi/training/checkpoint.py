# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: a run that was saved after an epoch resumes exactly, from one file without training data."""

import os
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyro
import torch
from torch import Tensor
from torch.optim import Optimizer

from pyro_dvi.core.batches import arguments
from pyro_dvi.core.file_format import FORMAT_VERSION, check_format_version
from pyro_dvi.errors import CheckpointError, GuideError
from pyro_dvi.runs.fingerprint import Fingerprint, stand_ins
from pyro_dvi.runs.trained_for import note_trained_for, trained_for
from pyro_dvi.training.history import History
from pyro_dvi.training.parameter_checks import check_parameters
from pyro_dvi.training.random_state import preserve_random_state, random_state, restore_random_state
from pyro_dvi.training.routes import Route
from pyro_dvi.training.targets import route_of

_FORMAT = "pyro_dvi checkpoint"


def save(
    path: str | os.PathLike[str],
    svi: Any,
    *,
    optimizer: Optimizer | None = None,
    lr_schedule: Any = None,
    history: History | None = None,
    loader: Any = None,
) -> None:
    """Save model, guide, ELBO, optimizer, parameter store, random state and history in one file.

    The file contains only tensors and plain values, so :func:`load` runs no code from it. It contains no training data.
    If a history from :func:`~pyro_dvi.training.fit` is passed, the file also contains the shapes and dtypes of the
    first batch, with which :func:`load` initialises the guide. To detect a different model, it contains the names,
    families and shapes of the model's sites and, if the guide has medians, parameters of these sites at the medians and
    artificial inputs. All this is saved only if batches consist of dense tensors in tuples, lists and dictionaries.
    Without a history, the buffers of networks that a function calls are not saved.

    Args:
        path: path of the file to write.
        svi: an ``SVI``, or the result of ``elbo(model, guide)``.
        optimizer: the torch optimizer, if ``svi`` is the result of ``elbo(model, guide)``.
        lr_schedule: a torch scheduler to save as well.
        history: the result of :func:`~pyro_dvi.training.fit`.
        loader: the training loader; the state of its ``generator`` is saved, so that shuffling continues unchanged.

    Raises:
        ArgumentError: if ``svi`` is neither an ``SVI`` nor the result of ``elbo(model, guide)``.
        CheckpointError: if the file cannot be written.
    """
    history = History() if history is None else history
    route = route_of(svi, optimizer, train=False)
    fingerprint = None
    if history.inputs is not None:
        args, kwargs = stand_ins(*history.inputs, route.device())
        with preserve_random_state():
            if route is not svi:
                route.initialise(args, kwargs)
            latents = _medians(route, args, kwargs)
            fingerprint = Fingerprint.of(route.model, args, kwargs, latents) or Fingerprint.of(
                route.model, args, kwargs
            )
    content = {
        "described": _described(route),
        "states": {role: part.state_dict() for role, part in route.all_modules().items()},
        "store": {name: value.detach() for name, value in route.store_parameters().items()},
        "elbo": route.elbo.state_dict() if hasattr(route.elbo, "state_dict") else None,
        "optimizer": route.optimizer_state(),
        "lr_schedule": None if lr_schedule is None else lr_schedule.state_dict(),
        "random": random_state(loader),
        "history": history.to_dict(),
        "best_weights": history.best_weights,
        "inputs": history.inputs,
        "fingerprint": fingerprint and dict(vars(fingerprint)),
    }
    _write(Path(path), content)


def load(
    path: str | os.PathLike[str],
    svi: Any,
    *,
    optimizer: Optimizer | None = None,
    lr_schedule: Any = None,
    loader: Any = None,
    example: Any = None,
    best: bool = False,
    restore_random: bool = True,
    map_location: Any = None,
) -> History:
    """Load a checkpoint written by :func:`save` into freshly built objects, and return the history.

    No weights are changed unless the types of guide, ELBO and optimizer, the names and shapes of parameters, and the
    names, shapes and prior families of the model's sites match those of the saved run. If the guide has medians, as all
    automatic guides have, the model must also compute the same at artificial inputs: prior scales, noise and
    activations must not change. To resume training, pass the result to ``fit``:
    ``fit(svi, loader, epochs, history=load(path, svi, loader=loader))``. If the file was saved after an epoch, the
    results on the CPU equal those of an uninterrupted run.

    Args:
        path: path of the file to read.
        svi: an ``SVI``, or the result of ``elbo(model, guide)``. Like the other objects, it must be built as for the
            saved run.
        optimizer: torch optimizer of an ``ELBOModule``. None skips the optimizer, which predictions do not need.
        lr_schedule: a torch scheduler whose state was saved.
        loader: the training loader, to restore its generator; None skips this.
        example: one batch. It is needed only if the file contains no shapes of batches and the guide is a function or
            one of Pyro's automatic guides, because these have no parameters before their first batch.
        best: True to load the weights of the best epoch (see ``EarlyStopping``) instead of those of the last epoch.
        restore_random: True to restore the states of the random generators.
        map_location: as for :func:`torch.load`.

    Raises:
        CheckpointError: if the file is missing, truncated, not a checkpoint, or from a later release; or if it does not
            match the objects, in which case the message names the differences.
        GuideError: if Pyro's store contains parameters of another guide under the same names.
    """
    route = route_of(svi, optimizer, train=False)
    saved = _read(Path(path), map_location)
    for wanted, part in ((best, "best_weights"), (lr_schedule is not None, "lr_schedule")):
        if wanted and saved[part] is None:
            raise CheckpointError(f"The checkpoint contains no {part}, because the run had none.")
    for what, now in _described(route).items():
        before = saved["described"][what]
        if before != now and None not in (before, now):
            raise CheckpointError(
                f"The checkpoint was trained with {what}{before}, but the target has {now}. Build both alike."
            )
    check_parameters(route)
    incomplete = any(name not in pyro.get_param_store() for name in saved["store"])
    if example is not None:
        route.initialise(*arguments(example, route.device()), always=incomplete)
    elif saved["inputs"] is not None:
        try:
            # Artificial observations may lie outside the support, for example of counts.
            with preserve_random_state(), pyro.validation_enabled(False):
                args, kwargs = saved["inputs"]
                route.initialise(*stand_ins(args, kwargs, route.device()), always=incomplete)
        except Exception as error:
            raise CheckpointError(
                f"The model or guide does not run on inputs of the shapes in the file ({first_line(error)}). The "
                "checkpoint may belong to another model or guide. If it does not, pass one batch as example=."
            ) from error
    _check_model(saved, route)
    before = route.weights()
    _load_weights(saved, route)
    try:
        _check_model(saved, route, weights_loaded=True)
    except CheckpointError:
        route.set_weights(before)
        raise
    rule = getattr(route.elbo, "prediction_rule", "Samples")
    if trained_for(route.guide) is None:  # guides of this library have brought theirs
        note_trained_for(route.guide, rule, getattr(route.elbo, "temperature", 1.0))
    if saved["elbo"] is not None:
        route.elbo.load_state_dict(saved["elbo"])
    if route.steered is not None:
        route.load_optimizer_state(saved["optimizer"])
        if hasattr(route.elbo, "prepare"):  # for training loops that do not call fit
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


def _described(route: Route) -> dict[str, Any]:
    """Return, by description, the types that must agree between file and target; None is not compared."""
    return {
        "": route.kind,
        "the modules ": sorted(route.modules()),
        # The type is compared because two guides may use the same names and shapes, although one stores log-scales.
        "the guide ": type(route.guide).__name__,
        # Inside DataParallel, if there is one.
        "the objective ": type(getattr(route.elbo, "elbo", route.elbo)).__name__,
        "the optimizer ": None if route.steered is None else route.optimizer_name(),
    }


def _check_model(saved: Mapping[str, Any], route: Route, weights_loaded: bool = False) -> None:
    """Compare the model's sites with those of the saved run; with loaded weights, also their parameters."""
    if saved["fingerprint"] is None:
        return
    fingerprint = Fingerprint(**saved["fingerprint"])
    with preserve_random_state():
        args, kwargs = stand_ins(fingerprint.args, fingerprint.kwargs, route.device())
        latents = _medians(route, args, kwargs) if weights_loaded else None
        differences = fingerprint.differences(route.model, latents)
    if differences:
        raise CheckpointError(
            f"The checkpoint belongs to another model: {differences} (saved → now). Build the model as for the saved "
            "run. To load only the weights, call guide.load_state_dict(...)."
        )


def _medians(route: Route, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor] | None:
    """Return the medians of the latents, at which two models can be compared; None for a guide without medians."""
    with suppress(NotImplementedError, AttributeError):
        return dict(route.guide.median(*args, **kwargs))
    return None


def _load_weights(saved: Mapping[str, Any], route: Route) -> None:
    """Load modules and Pyro's store; if a part does not fit, change no weights."""
    states, modules, store = saved["states"], route.all_modules(), pyro.get_param_store()
    existing = {name: value for name, value in store.named_parameters() if name in saved["store"]}
    with_buffers = {role for role, module in modules.items() if next(module.buffers(), None) is not None}
    missing = [*(states.keys() - modules.keys()), *(with_buffers - states.keys())]
    missing += [
        name
        for name, value in saved["store"].items()
        if name not in existing or existing[name].shape != value.shape
    ]
    if missing:
        raise CheckpointError(
            f"The checkpoint and the target differ in {missing[:5]}. Build model and guide as for the saved run. If "
            "they are functions, pass the result of fit as history= to save, or one batch as example= to load."
        )
    before = route.weights()
    # A fresh guide is the most likely to reject its state, so it is loaded first.
    for role in sorted(states, key=lambda role: role != "guide"):
        try:
            modules[role].load_state_dict(states[role])
        except (RuntimeError, KeyError, GuideError) as error:
            route.set_weights(before)
            raise CheckpointError(
                f"The checkpoint does not fit the {role}: {' '.join(str(error).split())}. Build the {role} as for the "
                "saved run. For a guide without parameters before its first call, pass one batch as example=."
            ) from error
    with torch.no_grad():
        for name, value in existing.items():
            value.copy_(saved["store"][name])


def _write(path: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint atomically, so that a crash leaves the previous file intact."""
    versions = {package: version(package) for package in ("pyro-dvi", "torch", "pyro-ppl")}
    content = {"format": _FORMAT, "version": FORMAT_VERSION, "versions": versions, **content}
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        torch.save(content, unfinished)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _read(path: Path, map_location: Any) -> dict[str, Any]:
    """Read a checkpoint; for the arguments see :func:`~pyro_dvi.training.load`.

    Raises:
        CheckpointError: if the file is missing, damaged, not a checkpoint, or from a later release.
    """
    try:
        content = torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{str(path)!r} is missing, not a checkpoint, damaged or truncated, or contains objects that torch does "
            f"not load safely (see torch.serialization.add_safe_globals): {first_line(error)}"
        ) from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise CheckpointError(
            f"{str(path)!r} was not written by pyro_dvi.save: it contains {list(content)[:5]}. Load a plain state_dict "
            "with load_state_dict, and a parameter store with pyro.get_param_store().load(path)."
        )
    check_format_version(f"{str(path)!r} of pyro-dvi {content['versions']['pyro-dvi']}", content["version"])
    return content


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return (str(error) or type(error).__name__).strip().splitlines()[0][:200]
