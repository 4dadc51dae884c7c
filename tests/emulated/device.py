# SPDX-License-Identifier: Apache-2.0
"""The emulated device as torch knows it: registered once a process, and in use within a context."""

import contextlib
from collections.abc import Iterator

import torch

from tests.emulated import random
from tests.emulated.tensor import NAME, copy_from, factory, swap

try:
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as _setup
except ImportError:  # an older torch
    _setup = None  # type: ignore[assignment]

AVAILABLE = _setup is not None
_libraries: list[torch.library.Library] = []  # a library that is collected takes its kernels along


class _Module:
    """``torch.emulated``, beside ``torch.cuda``."""

    is_initialized = is_available = staticmethod(
        lambda: torch.Generator is random.Generator
    )  # only while in use
    _is_in_bad_fork = staticmethod(lambda: False)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    manual_seed = manual_seed_all = staticmethod(random.default.manual_seed)
    get_rng_state = staticmethod(random.get_rng_state)
    set_rng_state = staticmethod(random.set_rng_state)
    get_rng_state_all = staticmethod(lambda: [random.get_rng_state()])
    set_rng_state_all = staticmethod(lambda states: random.set_rng_state(states[0]))


def register() -> None:
    """Make the device known. To be called before the first backward pass, which starts a thread for each device."""
    if _libraries or not AVAILABLE:
        return
    _setup(rename=NAME, backend_module=_Module())
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::"):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            schema = torch._C._get_schema(f"aten::{packet}", overload)
            arguments = {argument.name: str(argument.type) for argument in schema.arguments}
            if "device" in arguments and not any("Tensor" in kind for kind in arguments.values()):
                func = getattr(getattr(torch.ops.aten, packet), overload or "default")
                library.impl(name.removeprefix("aten::"), factory(func), "PrivateUse1")
    library.impl(
        "_copy_from", copy_from, "PrivateUse1"
    )  # torch.tensor(..., device=...) copies out of Python's reach


@contextlib.contextmanager
def in_use() -> Iterator[torch.device]:
    """Let modules move to the device and torch make generators for it."""
    ordinary, torch.utils.swap_tensors = torch.utils.swap_tensors, swap
    swapping = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(
        True
    )  # a module keeps its parameters, as between CPU and GPU
    torch.Generator = random.Generator  # type: ignore[misc, assignment]
    try:
        yield torch.device(NAME, 0)
    finally:
        torch.utils.swap_tensors = ordinary
        torch.Generator = random._CPU_GENERATOR  # type: ignore[misc]
        torch.__future__.set_swap_module_params_on_conversion(swapping)
