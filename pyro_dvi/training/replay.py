# SPDX-License-Identifier: Apache-2.0
"""The batches of an epoch, from where an interrupted one stopped."""

import warnings
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from pyro_dvi.errors import CheckpointError, DviWarning
from pyro_dvi.training.history import History
from pyro_dvi.training.random_state import random_state, restore_random_state

__all__ = ["Replay"]


class Replay:
    """One epoch's batches that training has not used yet.

    Args:
        loader: the training loader.
        history: its ``unfinished`` says where an interrupted epoch stopped.

    Attributes:
        last_used: the last batch that was used before, in a list; empty where the epoch begins.
    """

    def __init__(self, loader: Iterable[Any], history: History) -> None:
        self.last_used: list[Any] = []
        used = history.unfinished
        source = None if used is None else self._behind(loader, used)
        if source is None:
            history.unfinished = {"random": random_state(loader), "batches": 0, "read": False}
            source = iter(loader)
        self._source = source

    def __iter__(self) -> Iterator[Any]:
        return self._source

    def _behind(self, loader: Iterable[Any], used: dict[str, Any]) -> Iterator[Any] | None:
        """The loader behind the batches that were used; None, with a warning, if it cannot give those again."""
        now, count = random_state(loader), used["batches"]
        source: Iterator[Any] = iter(())
        try:
            restore_random_state(used["random"], loader)
            if not isinstance(loader, Iterator):
                source = iter(loader)
                self.last_used = list(islice(source, max(count - 1, 0), count))
        except CheckpointError:
            pass
        if not self.last_used and count:
            restore_random_state(now, loader)
            warnings.warn(
                f"The history ends within an epoch, after {count} batches, and this loader cannot give those again: it "
                "is an iterator, is shorter, or has other generators. The epoch starts anew, so that some examples "
                "count twice.",
                DviWarning,
                stacklevel=2,
            )
            return None
        if count:
            restore_random_state(now, loader)
        # Asked for a batch after the last, a loader may draw random numbers once more.
        return iter(()) if used["read"] else source
