# SPDX-License-Identifier: Apache-2.0
r"""When to stop, and which epoch to keep.

Training that is interrupted: signals wait until a step is done, and an epoch goes on where it stopped.
"""

import math
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from types import FrameType
from typing import Any

import numpy as np
import torch

from pyro_dvi.core.batches import is_strided, tensors_in
from pyro_dvi.core.choice import check_count
from pyro_dvi.errors import ArgumentError, CheckpointError, warn
from pyro_dvi.training.history import History
from pyro_dvi.training.random_state import random_state, restore_random_state


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
        """Whether the patience is used up."""
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
    """Let Ctrl-C, and the SIGTERM of a scheduler, end training with a ``KeyboardInterrupt`` after the current step.

    A second signal within a step passes at once. Where Python's own handlers are not in charge (another thread, a host
    with handlers of its own), nothing is changed.
    """

    def __init__(self) -> None:
        self._inside = self._held_back = False

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

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Hold a first signal back until the block is done, so that no optimizer stops halfway."""
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
        if self._held_back:
            self._held_back = False
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._inside or self._held_back:
            raise KeyboardInterrupt
        self._held_back = True


class Replay:
    """One epoch's batches that training has not used yet.

    Args:
        loader: the training loader.
        history: its ``unfinished`` says where an interrupted epoch stopped.

    Attributes:
        last_used: the last batch that was used, in a list; empty where the epoch begins.
    """

    def __init__(self, loader: Iterable[Any], history: History) -> None:
        self.last_used: list[Any] = []
        self.history = history
        used = history.unfinished
        source = None if used is None else self._behind(loader, used)
        if source is None:
            history.unfinished = {"random": random_state(loader), "batches": 0, "read": False}
            source = iter(loader)
        self._source = source

    def __iter__(self) -> Iterator[Any]:
        for batch in self._source:
            self._given = batch
            yield batch

    def note_used(self) -> None:
        """Count the batch that was given last: training has taken its step with it."""
        assert self.history.unfinished is not None
        self.history.unfinished["batches"] += 1
        self.last_used = [self._given]

    def note_read(self) -> int:
        """Note that the loader has ended, and return how many batches the epoch had."""
        assert self.history.unfinished is not None
        self.history.unfinished["read"] = True
        return int(self.history.unfinished["batches"])

    def note_last(self) -> None:
        """Put into the history of an unfinished epoch what its last batch will be recognised by."""
        if self.history.unfinished is not None and self.last_used:
            self.history.unfinished["last"] = _sums(self.last_used[0])

    def _behind(self, loader: Iterable[Any], used: dict[str, Any]) -> Iterator[Any] | None:
        """The loader behind the batches that were used; None, with a warning, if it cannot give those again."""
        now, count = random_state(loader), used["batches"]
        source: Iterator[Any] = iter(())
        with suppress(CheckpointError):
            restore_random_state(used["random"], loader)
            if not isinstance(loader, Iterator):
                source = iter(loader)
                self.last_used = list(islice(source, max(count - 1, 0), count))
        if count:
            restore_random_state(now, loader)
        last = used.get("last")
        if self.last_used and last is not None and not _alike(_sums(self.last_used[0]), last):
            self.last_used = []
        if not self.last_used and count:
            warn(
                f"The history ends within an epoch, after {count} batches, and this loader cannot give those again: it "
                "is an iterator, has other batches or other generators, or draws random numbers while it is read. The "
                "epoch starts anew, so that some examples count twice."
            )
            return None
        # Asked for a batch after the last, a loader may draw random numbers once more.
        return iter(()) if used["read"] else source


def _sums(batch: Any) -> list[float]:
    """Shape and weighted sum of every plain tensor of a batch; the weights tell orders of rows apart."""
    found: list[float] = []
    for value in tensors_in(batch):
        if is_strided(value) and not (value.is_complex() or value.is_quantized):
            flat = value.detach().cpu().double().nan_to_num(0.0, 0.0, 0.0).flatten()
            weights = torch.linspace(1, 2, len(flat), dtype=flat.dtype, device=flat.device)
            found += [*value.shape, float(flat @ weights)]
    return found


def _alike(first: list[float], second: list[float]) -> bool:
    # Another processor rounds otherwise.
    return len(first) == len(second) and np.allclose(first, second, rtol=1e-6, atol=1e-9)
