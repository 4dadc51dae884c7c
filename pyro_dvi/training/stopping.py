# SPDX-License-Identifier: Apache-2.0
"""When training stops: early, or by a signal."""

import math
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from pyro_dvi.core.arguments import check_count
from pyro_dvi.errors import ArgumentError
from pyro_dvi.training.history import History


@dataclass(frozen=True)
class EarlyStopping:
    """Stop when a validation metric has not improved for ``patience`` epochs.

    All its state is the history, so a resumed run stops where an uninterrupted one would.

    Args:
        patience: epochs without improvement until training stops.
        monitor: name of the metric: a key of what ``validate`` returns, ``"loss"`` for a loader or a single
            number.
        min_delta: how much better than the best a value must be to count, in units of the metric.
        maximise: whether larger is better (accuracy).
        restore_best: leave the model and guide with the parameters and buffers of the best epoch.

    Raises:
        ArgumentError: if ``patience`` is not a positive integer or ``min_delta`` is negative.

    Example:
        >>> stopping = EarlyStopping(patience=2)
        >>> stopping.best_epoch([3.0, 1.0, 2.0, 1.5]), stopping.exhausted([3.0, 1.0, 2.0, 1.5])
        (2, True)
    """

    patience: int = 10
    monitor: str = "loss"
    min_delta: float = 0.0
    maximise: bool = False
    restore_best: bool = True

    def __post_init__(self) -> None:
        check_count("EarlyStopping: patience", self.patience)
        if not math.isfinite(self.min_delta) or self.min_delta < 0:
            raise ArgumentError(f"EarlyStopping: min_delta must not be negative, got {self.min_delta!r}.")

    def best_epoch(self, values: Sequence[float]) -> int | None:
        """Return the position, from 1, of the last value that counted as an improvement; NaN never does."""
        best, position = math.inf, None
        for epoch, value in enumerate(values, start=1):
            cost = -value if self.maximise else value
            if cost < best - (self.min_delta if position is not None else 0.0):
                best, position = cost, epoch
        return position

    def exhausted(self, values: Sequence[float]) -> bool:
        """Tell whether the patience is used up."""
        return len(values) - (self.best_epoch(values) or 0) >= self.patience

    def monitored(self, history: History) -> list[float]:
        """Return the column that is watched.

        Raises:
            ArgumentError: if validation does not report the metric.
        """
        column = f"validation_{self.monitor}"
        if column not in history.epochs:
            prefix = "validation_"
            known = [name.removeprefix(prefix) for name in history.epochs if name.startswith(prefix)]
            raise ArgumentError(
                f"EarlyStopping monitors {self.monitor!r}, which validate does not report; it reports "
                f"{', '.join(map(repr, known)) or 'nothing'}."
            )
        return history.epochs[column]


class Interrupts:
    """Let Ctrl-C, and the SIGTERM of a scheduler, end training after the current step or validation.

    A second signal passes at once. Where Python's own handlers are not in charge (another thread, a host with handlers
    of its own), nothing is changed.
    """

    def __init__(self) -> None:
        self._signalled = False

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Handle both signals in the block."""
        usual: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
        main = threading.current_thread() is threading.main_thread()
        ours = [number for number, handler in usual.items() if main and signal.getsignal(number) == handler]
        for number in ours:
            signal.signal(number, self._handle)
        try:
            yield
        finally:
            for number in ours:
                signal.signal(number, usual[number])

    def check(self) -> None:
        """Raise ``KeyboardInterrupt`` if there has been a signal."""
        if self._signalled:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.check()
        self._signalled = True
