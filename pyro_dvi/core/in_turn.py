# SPDX-License-Identifier: Apache-2.0
"""Calls from several threads wait for each other: handlers and parameters of Pyro, and hooks of torch, are global."""

from contextlib import ContextDecorator
from threading import RLock


class _InTurn(ContextDecorator):
    """A context in which one thread is at a time; the same thread may enter it again."""

    def __init__(self) -> None:
        self._lock = RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


in_turn = _InTurn()
