# SPDX-License-Identifier: Apache-2.0
"""What happens when training diverges: back to a state in which it was well, and a report."""

import math
from contextlib import suppress
from typing import Any

from torch import linalg

from pyro_dvi.batches import non_finite_inputs
from pyro_dvi.errors import NonFiniteError, PyroDviError
from pyro_dvi.training.diagnosis import diagnose, non_finite_tensors
from pyro_dvi.training.history import History
from pyro_dvi.training.random_state import preserve_random_state
from pyro_dvi.training.routes import Route
from pyro_dvi.training.snapshot import Snapshot, copy_weights, restore_weights
from pyro_dvi.undisturbed import preserve_buffers

__all__ = ["Rollback"]

_NUMERICAL = (ValueError, ArithmeticError, linalg.LinAlgError)  # type: ignore[attr-defined]


class Rollback:
    """States to go back to: that of the last epoch and, until the first step after it has a loss, the one before.

    Args:
        route: what is being trained.
        history: its record.
    """

    def __init__(self, route: Route, history: History) -> None:
        self.route, self.history = route, history
        self.snapshots: list[Snapshot] = []

    def remember(self) -> None:
        """Keep the present state."""
        self.snapshots = [Snapshot(self.route, self.history.epoch), *self.snapshots[:1]]

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
        ours = isinstance(error, PyroDviError) and bool(self.snapshots)
        inputs = non_finite_inputs(args, kwargs) if diverged or not ours else []
        certain = bool(diverged or inputs or non_finite_tensors(self.route))
        if not certain and (isinstance(error, PyroDviError) or not isinstance(error, _NUMERICAL)):
            return None
        finding = f"{_sentence(error)} {diagnose(self.route, args, kwargs)}"  # before weights are touched
        if not certain and self._is_finite(args, kwargs):
            return None  # the error was none of the weights
        # Of several processes each sees its own batch only, and all have to go back to the same state.
        joint = hasattr(self.route.elbo, "agreed")
        position = 0 if inputs or (joint and diverged) else self._newest_good(args, kwargs)
        if position is None and not certain:
            return None  # the batch or the model is wrong, whatever the parameters are
        position = len(self.snapshots) - 1 if position is None else position
        return self.report(epoch, finding, position)

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
        now = copy_weights(self.route)
        try:
            for position, snapshot in enumerate(self.snapshots):
                snapshot.restore_weights(self.route)
                if self._is_finite(args, kwargs):
                    return position
            return None
        finally:
            restore_weights(self.route, now)

    def _is_finite(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this batch has a finite loss at the weights as they are."""
        with suppress(Exception), preserve_random_state(), preserve_buffers():
            return math.isfinite(self.route.evaluate(args, kwargs))
        return False


def _sentence(error: BaseException) -> str:
    text = (str(error) or type(error).__name__).strip().splitlines()[0]
    # Messages of our own may begin anywhere in a sentence; others stay as their authors wrote them.
    start = text[:1].upper() if isinstance(error, PyroDviError) else text[:1]
    return start + text[1:] + ("" if text.endswith(".") else ".")
