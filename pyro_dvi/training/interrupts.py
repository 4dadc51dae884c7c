# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM between steps, not inside them."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["Interrupts"]


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
