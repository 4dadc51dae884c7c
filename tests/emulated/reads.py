# SPDX-License-Identifier: Apache-2.0
"""Reads of values: each makes the program wait for the device, so a training step should need one, the loss."""

import collections
import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

_PACKAGE = "/pyro_dvi/"
_OWN = Path(__file__).parent
_SILENT = {
    str(_OWN / "tensor.py"),
    str(_OWN / "random.py"),
    str(_OWN / "reads.py"),
}  # they only carry a read out
_SILENT |= {
    str(Path(torch.__file__).parent / name)
    for name in ("_tensor.py", "functional.py", "_ops.py", "_jit_internal.py")
}
_listeners: list["Reads"] = []


class Reads(collections.Counter[tuple[str, str]]):
    """How often values were read, by what (``item``, ``copy to the CPU``) and where.

    A place is the innermost line of this library, with that of Pyro or torch below it which did the reading.
    """

    def __str__(self) -> str:
        return (
            "\n".join(f"{count} x {what} in {where}" for (what, where), count in self.most_common())
            or "no reads"
        )


@contextlib.contextmanager
def counted_reads() -> Iterator[Reads]:
    """Count the reads of values of emulated tensors within this context, whichever thread they happen in."""
    reads = Reads()
    _listeners.append(reads)
    try:
        yield reads
    finally:
        _listeners.remove(reads)


def note(what: str) -> None:
    """Note one read of a value, if anyone counts."""
    if _listeners:
        where = _where()
        for reads in _listeners:
            reads[what, where] += 1


def _where() -> str:
    if threading.current_thread() is not threading.main_thread():
        return "a backward pass"
    reader = ours = ""
    frame = sys._getframe(2)
    while frame is not None and not ours:
        name, line = frame.f_code.co_filename, frame.f_lineno
        if _PACKAGE in name:
            ours = f"pyro_dvi/{name.rpartition(_PACKAGE)[2]}:{line}"
        elif not reader and name not in _SILENT:
            reader = f"{'/'.join(name.split('/')[-3:])}:{line}"
        frame = frame.f_back  # type: ignore[assignment]
    return f"{ours} ({reader})" if ours and reader else ours or reader
