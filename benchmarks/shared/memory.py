# SPDX-License-Identifier: Apache-2.0
"""By how much memory grows at its peak: that of the process on Linux, that of the device on a GPU."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.shared.benchmark import device

__all__ = ["peak_growth"]


@contextmanager
def peak_growth() -> Iterator[dict[str, float]]:
    """Give a mapping that has ``memory_mib`` afterwards: peak within the block over what was held before it, in MiB.

    What earlier blocks have freed is given back to the system first, since it would hide what this one needs.
    """
    found: dict[str, float] = {}
    on_gpu = device().type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() / 2**20
    else:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
        before = _resident("VmRSS")
    yield found
    found["memory_mib"] = (
        torch.cuda.max_memory_allocated() / 2**20 if on_gpu else _resident("VmHWM")
    ) - before


def _resident(field: str) -> float:
    """Resident memory in MiB: "VmRSS" now, "VmHWM" at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024
