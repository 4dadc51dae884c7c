# SPDX-License-Identifier: Apache-2.0
"""Rollback of diverged training to the last good state, and a report that names what is not finite."""

import copy
import math
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, linalg

from pyro_dvi.core.batches import non_finite_inputs
from pyro_dvi.core.undisturbed import preserve_buffers
from pyro_dvi.errors import NonFiniteError, PyroDviError
from pyro_dvi.runs.explained import non_finite
from pyro_dvi.training.checkpoint import first_line
from pyro_dvi.training.history import History
from pyro_dvi.training.random_state import preserve_random_state, random_state, restore_random_state
from pyro_dvi.training.routes import Route

_NUMERICAL = (ValueError, ArithmeticError, linalg.LinAlgError)  # type: ignore[attr-defined]


class _Snapshot:
    """Weights, optimizer and ELBO at the end of an epoch; epoch 0 is the start of training."""

    def __init__(self, route: Route, history: History) -> None:
        self.epoch, self.steps = history.epoch, history.steps.rows
        self.weights = route.weights()
        self._optimizer = copy.deepcopy(route.optimizer_state())
        self._elbo = copy.deepcopy(route.elbo.state_dict()) if hasattr(route.elbo, "state_dict") else None

    def restore(self, route: Route) -> None:
        """Restore weights, optimizer and ELBO, and drop the gradients of the failed step."""
        route.set_weights(self.weights)
        route.load_optimizer_state(self._optimizer)
        if self._elbo is not None:
            route.elbo.load_state_dict(copy.deepcopy(self._elbo))
        for parameter in route.parameters().values():
            parameter.grad = None


class Rollback:
    """Snapshots of the last epoch and, until the next step has a finite loss, of the epoch before it.

    Args:
        route: the training.
        history: the record of the training.
        loader: the loader, whose generators are restored with the others.
    """

    def __init__(self, route: Route, history: History, loader: Any) -> None:
        self.route, self.history, self.loader = route, history, loader
        self.snapshots: list[_Snapshot] = []
        self._random: Any = None

    def remember(self) -> None:
        """Take a snapshot of the current state."""
        self.snapshots = [_Snapshot(self.route, self.history), *self.snapshots[:1]]

    def trust(self) -> None:
        """Keep only the newest snapshot, because a step from its state has succeeded."""
        del self.snapshots[1:]

    def note_random_state(self) -> None:
        """Note the random states at the beginning of an epoch, for :meth:`rewind`."""
        self._random = random_state(self.loader)

    def rewind(self) -> int:
        """Return to the beginning of the epoch, and return the number of steps that left the history."""
        (snapshot, *_), steps = self.snapshots, self.history.steps
        snapshot.restore(self.route)
        restore_random_state(self._random, self.loader)
        undone = steps.rows - snapshot.steps
        for column in steps.values():
            del column[snapshot.steps :]
        return undone

    def after(
        self, error: Exception, epoch: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> NonFiniteError | None:
        """Roll back after an error in a step and return the report; None if training has not diverged.

        Divergence may raise other errors before the loss is computed: Pyro's validation or a factorisation fails on a
        NaN, or parameters that are finite but far too large make distributions invalid. The batch then has a finite
        loss at earlier weights, but not at the current weights. Problems with the data need no report, because the
        errors of this library already describe them.
        """
        diverged = isinstance(error, NonFiniteError)
        # Before the first snapshot, the guide runs the model, perhaps with bad inputs.
        ours = isinstance(error, PyroDviError) and not isinstance(error, ArithmeticError)
        inputs = non_finite_inputs(args, kwargs) if diverged or not (ours and self.snapshots) else []
        certain = bool(diverged or inputs or non_finite_tensors(self.route))
        numerical = isinstance(error, _NUMERICAL) and not ours
        if not certain and (not numerical or self._is_finite_at({}, args, kwargs)):
            return None  # the weights did not cause the error
        finding = f"{first_line(error).rstrip('.')}. {_diagnosis(self.route, args, kwargs)}"
        # Each of several processes sees only its own batch, but all must roll back to the same state.
        if inputs or (diverged and hasattr(self.route.elbo, "agreed")):
            return self.report(epoch, finding)
        for snapshot in self.snapshots:
            if self._is_finite_at(snapshot.weights, args, kwargs):
                return self.report(epoch, finding, snapshot)
        # No earlier weights help, so the batch or the model causes the error, whatever the parameters.
        return self.report(epoch, finding, *self.snapshots[-1:]) if certain else None

    def check_after_epoch(self, epoch: int) -> None:
        """Roll back if the last step of an epoch has made parameters non-finite.

        Raises:
            NonFiniteError: if a parameter is not finite.
        """
        if non_finite_tensors(self.route):
            raise self.report(
                epoch,
                f"the last update was not finite, although the loss was. {_diagnosis(self.route, (), {})}",
            )

    def report(self, epoch: int, finding: str, snapshot: _Snapshot | None = None) -> NonFiniteError:
        """Roll back to a snapshot, by default the newest, and describe what happened."""
        step, kept = self.history.step + 1, "as they were before training"
        for chosen in [snapshot] if snapshot else self.snapshots[:1]:
            chosen.restore(self.route)
            if chosen.epoch:
                kept = f"as they were after epoch {chosen.epoch}"
        self.history.stopped = "non-finite"
        error = NonFiniteError(
            f"Training diverged in epoch {epoch}, step {step}: {finding} Parameters, buffers and optimizer are "
            f"{kept}. The attribute history of this error contains the record until then."
        )
        error.history, error.epoch, error.step = self.history, epoch, step
        return error

    def _is_finite_at(
        self, weights: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Return True if the loss of a batch is finite at given weights; an empty mapping means the current weights."""
        now = self.route.weights()
        try:
            self.route.set_weights(weights)
            with suppress(Exception), preserve_random_state(), preserve_buffers():
                return math.isfinite(self.route.evaluate(args, kwargs))
            return False
        finally:
            self.route.set_weights(now)


def non_finite_tensors(route: Route) -> list[str]:
    """Return the names of parameters and buffers that should be finite but are not."""
    # The parameters are taken from the route, because detached copies have lost requires_grad.
    parameters = {f"parameter {name}": value for name, value in route.parameters().items()}
    return non_finite({**route.tensors(), **parameters})


def _diagnosis(route: Route, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Name what is not finite among inputs, state, terms and gradients, with causes before effects, and a remedy."""
    parameters = route.parameters()
    state = [name.split(" ", 1) for name in non_finite_tensors(route)]
    terms = {name: float(value) for name, value in getattr(route.elbo, "terms", {}).items() if name != "loss"}
    found = {
        "inputs of this batch": non_finite_inputs(args, kwargs),
        "parameters": [name for kind, name in state if kind == "parameter"],
        "terms of the loss": [f"{name}={v:g}" for name, v in terms.items() if not math.isfinite(v)],
    }
    if not any(found.values()):  # report gradients only if nothing else explains the divergence
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        found["gradients"] = [name for name, g in gradients.items() if not bool(torch.isfinite(g).all())]
    found["buffers"] = [name for kind, name in state if kind == "buffer"]
    text = "; ".join(f"{what}: {', '.join(names[:5])}" for what, names in found.items() if names)
    if found["inputs of this batch"]:
        return f"Not finite: {text}. Drop or mask those values."
    if text:
        text = f"Not finite: {text}"
    else:
        sizes = {name: float(p.detach().abs().max()) for name, p in parameters.items() if p.numel()}
        name = max(sizes, key=sizes.__getitem__, default="none")
        text = (
            f"All known terms are finite; the largest parameter is {name} (up to {sizes.get(name, 0.0):.3g})"
        )
    return (
        f"{text}. Lower the learning rate (of posterior scales first, with scale_multiplier), warm up the KL weight, "
        "clip gradients (clip_args), or train in float64."
    )
