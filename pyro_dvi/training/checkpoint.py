# SPDX-License-Identifier: Apache-2.0
"""One file with everything that a run needs to go on as if it had never stopped."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from pyro_dvi.core.arguments import check_choice, check_count
from pyro_dvi.errors import CheckpointError, ModelError
from pyro_dvi.training.checkpoint_contents import Contents
from pyro_dvi.training.checkpoint_file import read_file
from pyro_dvi.training.history import History
from pyro_dvi.training.random_state import check_generators, restore_random_state
from pyro_dvi.training.routes import route_of


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
        ArgumentError: if ``svi`` is neither of the two, or ``history`` is none.
        CheckpointError: if the file cannot be written.
    """
    if history is not None:
        check_choice("history", history, History, "the one that fit returned")
    route = route_of(svi, optimizer, train=False)
    Contents(route, modules or {}, lr_schedule, loader).write(path, history)


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
    contents = Contents(route_of(svi, optimizer, train=False), modules or {}, lr_schedule, loader)
    saved = read_file(Path(path), map_location, weights_only)
    if best and saved["best_weights"] is None:
        raise CheckpointError("The checkpoint holds no best weights: early stopping did not watch this run.")
    # Without a loader there is no generator to restore; with one, its generators must be those of the file.
    random = saved["random"] if loader is not None else {**saved["random"], "loaders": []}
    contents.check(saved)
    if restore_random:
        check_generators(random, loader)
    history = contents.load(saved, example)
    if best:
        contents.route.set_weights(saved["best_weights"])
    if restore_random:
        restore_random_state(random, loader)
    return history
