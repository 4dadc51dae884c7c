# SPDX-License-Identifier: Apache-2.0
"""An accelerator that any machine has: tensors report another device while their values stay on the CPU.

What a GPU would refuse is refused here too: tensors of two devices in one operation (those without dimensions aside),
a generator of another device, NumPy. What a GPU would have to wait for, a read of a value by the program, is counted
with the place that asked (:mod:`tests.emulated.reads`). The device may refuse float64, as Apple's does.

It needs torch's Python backend for the dispatch key that torch keeps for foreign devices; torch 2.8 has none.
"""

from tests.emulated.device import AVAILABLE, in_use, register
from tests.emulated.reads import Reads, counted_reads
from tests.emulated.tensor import no_float64

__all__ = ["AVAILABLE", "Reads", "counted_reads", "in_use", "no_float64", "register"]
