# SPDX-License-Identifier: Apache-2.0
"""Calls from several threads wait for each other: handlers and parameters of Pyro, and hooks of torch, are global."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock, local
from typing import Any

from torch.utils.data import DataLoader


class _Mine(local):
    """What belongs to each thread: how often it has entered, and its contexts."""

    depth = 0
    contexts: tuple[AbstractContextManager[Any], ...] = ()


class _Turn:
    """A context that one thread at a time may enter, in the order of arrival; the same thread may enter it again.

    Inside, a thread may have contexts of its own, and let other threads have a turn. While another thread has its turn,
    the contexts are left: Pyro's store and the random states are then those of the other thread.
    """

    def __init__(self) -> None:
        self._queue, self._lock, self._mine = Lock(), Lock(), _Mine()
        self._entered: list[AbstractContextManager[Any]] = []
        self._passed: list[tuple[AbstractContextManager[Any], ...]] = [
            ()
        ]  # of threads that have passed their turn

    def __enter__(self) -> None:
        if not self._mine.depth:
            with self._queue:  # so that a thread that passes its turn gets it back only after those that wait
                self._lock.acquire()
            self._enter_only(self._mine.contexts)
        self._mine.depth += 1

    def __exit__(self, *error: object) -> None:
        self._mine.depth -= 1
        if not self._mine.depth:
            self._enter_only(max(self._passed, key=len))  # the code of that thread may be running
            self._lock.release()

    def _enter_only(self, contexts: tuple[AbstractContextManager[Any], ...]) -> None:
        while tuple(self._entered) != contexts[: len(self._entered)]:
            self._entered.pop().__exit__(None, None, None)
        for context in contexts[len(self._entered) :]:
            context.__enter__()
            self._entered.append(context)

    @contextmanager
    def own(self, *contexts: AbstractContextManager[Any]) -> Iterator[None]:
        """Have a turn, in which these contexts are entered; they must be reusable."""
        with self:
            before = self._mine.contexts
            self._mine.contexts = before + contexts
            try:
                self._enter_only(self._mine.contexts)
                yield
            finally:
                self._mine.contexts = before
                self._enter_only(before)

    @contextmanager
    def passed(self) -> Iterator[None]:
        """Let other threads have a turn until the end of this context, which need not be in turn."""
        depth, self._mine.depth = self._mine.depth, 0
        if depth:
            self._passed.append(self._mine.contexts)
            self._lock.release()
        try:
            yield
        finally:
            if depth:
                self.__enter__()
                self._passed.remove(self._mine.contexts)
            self._mine.depth = depth

    def passed_for(self, values: Iterable[Any]) -> Iterator[Any]:
        """Yield the values of an iterable; before each, other threads have a turn.

        They also have it while other code than a ``DataLoader`` computes the value: this code may wait for another
        thread. A ``DataLoader`` draws from the random states of the thread that has its turn.
        """
        iterator, end = iter(values), object()
        draws = isinstance(values, DataLoader)
        while True:
            with self.passed():
                value = None if draws else next(iterator, end)
            if draws:
                value = next(iterator, end)
            if value is end:
                return
            yield value


in_turn = _Turn()
