# SPDX-License-Identifier: Apache-2.0
"""What happens when training diverges: back to a state in which it was well, and a report of what went bad."""

import copy
import math
from contextlib import suppress
from typing import Any

import torch
from torch import linalg

from pyro_dvi.core.batches import non_finite_inputs
from pyro_dvi.core.undisturbed import preserve_buffers
from pyro_dvi.errors import NonFiniteError, PyroDviError
from pyro_dvi.runs.explained import non_finite
from pyro_dvi.training.checkpoint_file import first_line
from pyro_dvi.training.history import History
from pyro_dvi.training.random_state import preserve_random_state
from pyro_dvi.training.routes import Route

_NUMERICAL = (ValueError, ArithmeticError, linalg.LinAlgError)  # type: ignore[attr-defined]


class _Snapshot:
    """Weights, optimizer and ELBO at the end of an epoch.

    Args:
        route: what is being trained.
        epoch: the epoch that has just ended; 0 before the first.
    """

    def __init__(self, route: Route, epoch: int) -> None:
        self.epoch = epoch
        self.weights = route.weights()
        self._optimizer = copy.deepcopy(route.optimizer_state())
        self._elbo = copy.deepcopy(route.elbo.state_dict()) if hasattr(route.elbo, "state_dict") else None

    def restore(self, route: Route) -> None:
        """Put everything back, and drop the gradients of the step that failed."""
        route.set_weights(self.weights)
        route.load_optimizer_state(self._optimizer)
        if self._elbo is not None:
            route.elbo.load_state_dict(copy.deepcopy(self._elbo))
        for parameter in route.parameters().values():
            parameter.grad = None


class Rollback:
    """States to go back to: that of the last epoch and, until the first step after it has a loss, the one before.

    Args:
        route: what is being trained.
        history: its record.
    """

    def __init__(self, route: Route, history: History) -> None:
        self.route, self.history = route, history
        self.snapshots: list[_Snapshot] = []

    def remember(self) -> None:
        """Keep the present state."""
        self.snapshots = [_Snapshot(self.route, self.history.epoch), *self.snapshots[:1]]

    def trust(self) -> None:
        """Forget the state before the newest, from which a step has been taken."""
        del self.snapshots[1:]

    def after(
        self, error: Exception, epoch: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> NonFiniteError | None:
        """Go back after an error in a step and return the report; None if training has not diverged.

        Pyro's validation, or a factorisation, meets a NaN before the loss does, and parameters that are finite but far
        too large make distributions impossible: the batch then has a loss at earlier weights, but not at the present
        ones. An error of our own says by itself what is wrong with the data.
        """
        diverged = isinstance(error, NonFiniteError)
        # Before there is a snapshot, the guide looks at the model for the first time, and may have met bad inputs.
        ours = isinstance(error, PyroDviError) and not isinstance(error, ArithmeticError)
        inputs = non_finite_inputs(args, kwargs) if diverged or not (ours and self.snapshots) else []
        certain = bool(diverged or inputs or non_finite_tensors(self.route))
        if not certain and (ours or not isinstance(error, _NUMERICAL)):
            return None
        finding = f"{_sentence(error)} {_diagnosis(self.route, args, kwargs)}"  # before weights are touched
        if not certain and self._is_finite(args, kwargs):
            return None  # the error was none of the weights
        # Of several processes each sees its own batch only, and all have to go back to the same state.
        joint = diverged and hasattr(self.route.elbo, "agreed")
        position = 0 if inputs or joint else self._newest_good(args, kwargs)
        if position is not None:
            return self.report(epoch, finding, position)
        # Without certainty, the batch or the model is wrong, whatever the parameters are.
        return self.report(epoch, finding, len(self.snapshots) - 1) if certain else None

    def check_after_epoch(self, epoch: int) -> None:
        """Go back if the last step of an epoch has spoilt the parameters, after its loss was taken.

        Raises:
            NonFiniteError: the report.
        """
        if non_finite_tensors(self.route):
            raise self.report(
                epoch, f"The loss was finite until the last step. {_diagnosis(self.route, (), {})}"
            )

    def report(self, epoch: int, finding: str, position: int = 0) -> NonFiniteError:
        """Go back to a snapshot and describe what happened."""
        step = self.history.step + 1
        kept = "as they were before training"
        if self.snapshots:
            self.snapshots[position].restore(self.route)
            if self.snapshots[position].epoch:
                kept = f"as they were after epoch {self.snapshots[position].epoch}"
        self.history.stopped, self.history.unfinished = "non-finite", None
        error = NonFiniteError(
            f"Training diverged in epoch {epoch}, step {step}. {finding} Parameters, buffers and optimizer are "
            f"{kept}; the record until then is this error's .history."
        )
        error.history, error.epoch, error.step = self.history, epoch, step
        return error

    def _newest_good(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """Position of the newest snapshot at whose weights this batch has a finite loss."""
        now = self.route.weights()
        try:
            for position, snapshot in enumerate(self.snapshots):
                self.route.set_weights(snapshot.weights)
                if self._is_finite(args, kwargs):
                    return position
            return None
        finally:
            self.route.set_weights(now)

    def _is_finite(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this batch has a finite loss at the weights as they are."""
        with suppress(Exception), preserve_random_state(), preserve_buffers():
            return math.isfinite(self.route.evaluate(args, kwargs))
        return False


def non_finite_tensors(route: Route) -> list[str]:
    """Names of parameters and buffers that should be finite and are not."""
    # Copies of weights are detached and do not say whether they are trained.
    parameters = {f"parameter {name}": value for name, value in route.parameters().items()}
    return non_finite({**route.tensors(), **parameters})


def _diagnosis(route: Route, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Name what is not finite among inputs, state, terms and gradients, causes before effects, and the way out."""
    state = [name.split(" ", 1) for name in non_finite_tensors(route)]
    terms = {name: float(value) for name, value in getattr(route.elbo, "terms", {}).items() if name != "loss"}
    causes = {
        "inputs of this batch": non_finite_inputs(args, kwargs),
        "parameters": [name for kind, name in state if kind == "parameter"],
        "terms of the loss": [
            f"{name}={value:g}" for name, value in terms.items() if not math.isfinite(value)
        ],
    }
    found = {**causes, "buffers": [name for kind, name in state if kind == "buffer"]}
    if not any(causes.values()):  # gradients, only if nothing else explains them
        gradients = {name: p.grad for name, p in route.parameters().items() if p.grad is not None}
        found["gradients"] = [name for name, g in gradients.items() if not bool(torch.isfinite(g).all())]
    text = "; ".join(f"{what}: {_shortened(names)}" for what, names in found.items() if names)
    if found["inputs of this batch"]:
        return f"Not finite: {text}. Drop or mask those values."
    return (
        f"{f'Not finite: {text}' if text else _largest(route)}. Lower the learning rate (that of posterior scales "
        "first: scale_multiplier), warm up the KL weight, clip gradients (clip_args), or train in float64."
    )


def _largest(route: Route) -> str:
    parameters = {name: value for name, value in route.parameters().items() if value.numel()}
    sizes = {name: float(value.detach().abs().max()) for name, value in parameters.items()}
    name = max(sizes, key=sizes.__getitem__, default="none")
    return (
        f"Inputs, parameters and the known terms of the loss are finite; the largest parameter is {name} (up to "
        f"{sizes.get(name, 0.0):.3g})"
    )


def _shortened(names: list[str], limit: int = 5) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest


def _sentence(error: BaseException) -> str:
    text = first_line(error)
    # Messages of our own may begin anywhere in a sentence; others stay as their authors wrote them.
    start = text[:1].upper() if isinstance(error, PyroDviError) else text[:1]
    return start + text[1:] + ("" if text.endswith(".") else ".")
