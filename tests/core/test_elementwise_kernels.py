# SPDX-License-Identifier: Apache-2.0
"""Kernels are used only where they work."""

import sys
from types import ModuleType

import pytest
import torch

from pyro_dvi.core import elementwise
from pyro_dvi.core.elementwise import triton_kernel
from pyro_dvi.errors import DviWarning

PATH, CPU = "a_module_with_kernels:double", torch.device("cpu")


def check(kernel):
    return kernel(torch.ones(3)), torch.full((3,), 2.0)


def fails(x):
    raise RuntimeError("Failed to find C compiler")


@pytest.fixture
def module(monkeypatch):
    monkeypatch.setattr(elementwise, "_FOUND", {})
    made = ModuleType("a_module_with_kernels")
    monkeypatch.setitem(sys.modules, "a_module_with_kernels", made)
    return made


def test_a_kernel_that_works_is_used(module):
    module.double = lambda x: 2 * x
    assert triton_kernel(PATH, CPU, check) is module.double
    kernel, module.double = module.double, fails  # it is decided once
    assert triton_kernel(PATH, CPU, check) is kernel


def test_without_triton_nothing_is_said(module, monkeypatch):
    monkeypatch.setitem(sys.modules, "a_module_with_kernels", None)
    assert triton_kernel(PATH, CPU, check) is None


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (fails, "Failed to find C compiler"),
        (lambda x: 2.1 * x, "a kernel gives wrong results"),
        (lambda x: x * torch.nan, "a kernel gives wrong results"),
    ],
)
def test_other_kernels_are_not_used(kernel, reason, module):
    module.double = kernel
    with pytest.warns(DviWarning, match=f"Triton does not work on cpu, .* instead of double: {reason}"):
        assert triton_kernel(PATH, CPU, check) is None
    assert triton_kernel(PATH, CPU, check) is None  # without a second warning
