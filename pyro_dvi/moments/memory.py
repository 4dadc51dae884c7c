# SPDX-License-Identifier: Apache-2.0
"""Which moments a change in place makes unusable."""

from __future__ import annotations

from weakref import ref

__all__ = ["Memory"]


class Memory:
    """What moments that alias each other share: the count of changes in place.

    Parts of moments (those of ``chunk``) have a memory each, below that of the whole: they do not overlap.
    """

    __slots__ = ("__weakref__", "parts", "version", "whole")

    def __init__(self, whole: Memory | None = None) -> None:
        self.version = 0
        self.whole = whole
        self.parts: list[list[ref[Memory]]] = []  # those of one call do not overlap each other

    def divided(self, count: int) -> list[Memory]:
        """Return memories for parts."""
        memories = [Memory(self) for _ in range(count)]
        living = [group for group in self.parts if any(m() is not None for m in group)]
        self.parts = [*living, [ref(m) for m in memories]]
        return memories

    def changed(self, part: Memory | None = None) -> None:
        """Count a change, of one part only if given, wherever it can be seen."""
        self.version += 1
        for group in self.parts:
            memories = [memory for m in group if (memory := m()) is not None]
            if not any(memory is part for memory in memories):
                for memory in memories:
                    memory.overwritten()
        if self.whole is not None:
            self.whole.changed(self)

    def overwritten(self) -> None:
        """Count a change that came from the whole."""
        self.version += 1
        for group in self.parts:
            for m in group:
                memory = m()
                if memory is not None:
                    memory.overwritten()
