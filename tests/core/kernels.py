# SPDX-License-Identifier: Apache-2.0
"""The functions that run as one kernel on a GPU, and a CPU that takes the paths of a GPU."""

import contextlib
from collections.abc import Iterator

import pytest
import torch

from pyro_dvi.core import batch_norm, elementwise
from pyro_dvi.core.elementwise import Elementwise
from pyro_dvi.curvature import second_derivatives
from pyro_dvi.moments import activations, bilinear, normalisation, piecewise, quadrature, smooth
from pyro_dvi.moments.smooth import Rescaled, Smooth

MODULES = (
    elementwise,
    batch_norm,
    second_derivatives,
    bilinear,
    normalisation,
    piecewise,
    quadrature,
    smooth,
    activations,
)


def name_of(function: Elementwise) -> str:
    return function.operator._schema.name.removeprefix("pyro_dvi::")


def _collect() -> Iterator[Elementwise]:
    for module in MODULES:
        for function in vars(module).values():
            function = function.smooth if isinstance(function, Rescaled) else function
            function = function.kernel if isinstance(function, Smooth) else function
            while isinstance(function, Elementwise):
                yield function
                function = function.gradient


FUNCTIONS = {name_of(function): function for function in _collect()}


@contextlib.contextmanager
def kernels_on_cpu() -> Iterator[None]:
    """Let tensors on the CPU take the paths of a GPU; the function in torch stands for each kernel."""
    library = torch.library.Library("pyro_dvi", "IMPL")
    with pytest.MonkeyPatch.context() as patch:
        for name, function in FUNCTIONS.items():
            library.impl(name, function.plain, "CPU")
        for module in MODULES:
            if hasattr(module, "fuses"):
                patch.setattr(module, "fuses", lambda *tensors: True)
        patch.setattr(batch_norm, "_LARGEST_BLOCK", 32)
        yield
    library._destroy()
