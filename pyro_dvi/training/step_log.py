# SPDX-License-Identifier: Apache-2.0
"""The steps of training on their way to the history; losses may be read from the device many steps later."""

import math
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.objectives.recorded_step import Outcome
from pyro_dvi.training.history import History
from pyro_dvi.training.rollback import Rollback
from pyro_dvi.training.routes import Route

_MOST = 256  # largest number of steps whose losses are left on the device
_TERMS = ("log_likelihood", "penalty", "kl")


class FailedStep(Exception):  # noqa: N818 (not an error: the epoch is repeated)
    """Signals that a step whose loss was not read at once has failed, and that training is back at the last epoch.

    Attributes:
        undone: number of steps since then.
    """

    def __init__(self, undone: int) -> None:
        super().__init__()
        self.undone = undone


class StepLog:
    """The steps of training, added to the history once their losses are read.

    Args:
        route: the training.
        history: the record of the training.
        rollback: snapshots of the training.

    Attributes:
        loss: the last loss that was read.
    """

    def __init__(self, route: Route, history: History, rollback: Rollback) -> None:
        self._route, self._history, self._rollback = route, history, rollback
        # The rows, and for those that are not read, their report and the names of what it holds.
        self._unread: list[tuple[dict[str, Any], Tensor | None, list[str]]] = []
        self.loss = math.nan

    def add(self, epoch: int, loss: float | Outcome) -> None:
        """Add a step, given its loss or the outcome that contains its loss."""
        step, terms = self._history.step + len(self._unread) + 1, getattr(self._route.elbo, "terms", {})
        is_read = not isinstance(loss, Outcome)
        row: dict[str, Any] = {"epoch": epoch, "step": step, "loss": loss if is_read else None}
        row |= {name: float(terms[name]) if is_read else None for name in _TERMS if name in terms}
        row |= {name: float(terms[name]) for name in ("kl_weight",) if name in terms}
        row["lr"] = self._route.learning_rate()
        report, names = (loss.report, list(loss.terms)) if isinstance(loss, Outcome) else (None, [])
        self._unread.append((row, report, names))
        if is_read or len(self._unread) == _MOST:
            self.read()

    def read(self) -> None:
        """Read all losses, and add the steps to the history.

        Raises:
            FailedStep: if a condition of a replay failed, or a loss is not finite.
        """
        unread, self._unread = self._unread, []
        reports = [report for _, report, _ in unread if report is not None]
        values = iter(torch.stack(reports).tolist() if reports else [])
        for number, (row, report, names) in enumerate(unread):
            if report is not None:
                holds, *found = next(values)
                row |= {k: v for k, v in zip(names, found, strict=True) if k in row}
                if not holds or not math.isfinite(row["loss"]):
                    raise FailedStep(self._rollback.rewind() + len(unread) - number)
            self._history.steps.append(**row)
            self.loss = row["loss"]
        if unread:
            self._rollback.trust()
