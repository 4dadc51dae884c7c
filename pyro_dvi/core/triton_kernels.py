# SPDX-License-Identifier: Apache-2.0
"""Kernels in Triton, which are used where Triton is installed, compiles, and gives the results of torch functions."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.errors import warn

_FOUND: dict[tuple[str, torch.device], Any] = {}


def triton_kernel(path: str, device: torch.device, check: Callable[[Any], tuple[Tensor, Tensor]]) -> Any:
    """Return a kernel that works on a device, or None; this is decided at the first call.

    Without Triton, the answer is None. If the kernel fails or is wrong, the answer is None, too, with a warning.

    Args:
        path: the module of the kernel, and its name after a colon.
        device: a GPU.
        check: given the kernel, returns results of the kernel and of torch functions, which may differ by one percent.
    """
    if (path, device) not in _FOUND:
        _FOUND[path, device] = _working(path, device, check)
    return _FOUND[path, device]


def _working(path: str, device: torch.device, check: Callable[[Any], tuple[Tensor, Tensor]]) -> Any:
    module, _, name = path.partition(":")
    try:
        kernel = getattr(import_module(module), name)
    except ImportError:
        return None
    try:
        found, expected = check(kernel)
        if not (found - expected).norm() <= 0.01 * expected.norm():
            raise RuntimeError("a kernel gives wrong results")
    except Exception as error:  # such as a missing C compiler
        warn(
            f"Triton does not work on {device}, so slower torch functions are used instead of {name}: {error}"
        )
        return None
    return kernel
