# SPDX-License-Identifier: Apache-2.0
"""Elementwise functions that run as one kernel on a CUDA device, and the choice of kernels in Triton.

Activations are larger than the caches of a GPU, so a chain of torch functions takes as long as reading and writing all
intermediate results. Torch's jiterator compiles C++ code into a single kernel, with broadcasting and for any strides.
It compiles at the first call, which takes a fraction of a second, and keeps compiled kernels on disk.

For recordings and autograd, a kernel is one operator. Elsewhere, the torch functions with which the function is also
defined run as if there were no kernel: on other devices, in half precision, and in transforms of :mod:`torch.func`.
"""

import inspect
from collections.abc import Callable
from functools import cached_property
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pyro_dvi.errors import warn

_LIBRARY = torch.library.Library(
    "pyro_dvi", "FRAGMENT"
)  # torch.library.custom_op would import torch's compiler


def fuses(*tensors: Any) -> bool:
    """Return True for tensors that a kernel takes: all in float32 or all in float64, on one CUDA device."""
    first = tensors[0]
    return (
        first.is_cuda
        and not torch.compiler.is_compiling()
        and first.dtype in (torch.float32, torch.float64)
        and all((t.dtype, t.device) == (first.dtype, first.device) for t in tensors)
        and not torch._C._are_functorch_transforms_active()
    )


class Elementwise:
    """An elementwise function that is defined twice: in torch, and in C++.

    Args:
        name: name of the operator.
        results: names of the results in C++, separated by commas.
        body: C++ statements that compute the results for one element. Arguments have the same names as in torch. Their
            type is ``T``, which is ``float`` or ``double``.
        plain: the function in torch, of at most eight tensors.
        gradient: function of the gradients of the results and of the arguments. It returns the gradients of the
            arguments, before sums over broadcast dimensions. Without it, autograd sees the function in torch.
        unchanged: number of leading arguments that the kernel returns before its results. Their gradients come first in
            ``gradient``, which adds them to its own; autograd would add them in a separate pass over memory.

    Attributes:
        code: the function in C++.
        operator: the kernel as a torch operator, without a gradient.
    """

    _compiles = True

    def __init__(
        self,
        name: str,
        results: str,
        body: str,
        plain: Callable[..., Any],
        gradient: Callable[..., Any] | None = None,
        unchanged: int = 0,
    ) -> None:
        self.plain, self.gradient, self.unchanged = plain, gradient, unchanged
        self._checked: set[torch.dtype] = set()
        names, self._results = inspect.signature(plain).parameters, results.split(", ")
        arguments = ", ".join([f"T {n}" for n in names] + [f"T& {r}" for r in self._results])
        self.code = f"template <typename T> void {name}({arguments}) {{{body}}}"
        given, returned = (
            ", ".join(kinds) for kinds in ([f"Tensor {n}" for n in names], ["Tensor"] * len(self._results))
        )
        _LIBRARY.define(f"{name}({given}) -> ({returned})")
        _LIBRARY.impl(name, self._run, "CUDA")
        torch.library.register_fake(f"pyro_dvi::{name}", self._empty, lib=_LIBRARY)
        self.operator = getattr(torch.ops.pyro_dvi, name).default

    def __call__(self, *tensors: Any) -> Any:
        """Return one result or several; arguments are given by position."""
        if not fuses(*tensors):
            return self.plain(*tensors)
        if self.gradient is not None:
            return _Node.apply(self, *tensors)
        tracked = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        return self.plain(*tensors) if tracked else self.operator(*tensors)

    def _run(self, *tensors: Tensor) -> Any:
        if Elementwise._compiles:
            try:
                found = self._kernel(*tensors)
                if (
                    tensors[0].dtype not in self._checked
                ):  # at the first call, with values that occur in practice
                    self._checked.add(tensors[0].dtype)
                    self._check(_several(found), _several(self.plain(*tensors)))
                return found
            except (RuntimeError, AttributeError) as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                Elementwise._compiles = False
                warn(f"kernels do not work, so slower torch functions run on the GPU instead: {error}")
        return self.plain(*tensors)

    @staticmethod
    def _check(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
        for one, other in zip(found, expected, strict=True):
            if not (one - other).norm() <= 0.01 * other.norm() and other.isfinite().all():
                raise RuntimeError("a kernel gives wrong results")

    @cached_property
    def _kernel(self) -> Callable[..., Any]:
        return torch.cuda.jiterator._create_multi_output_jit_fn(self.code, len(self._results))

    def _empty(self, *tensors: Tensor) -> Any:
        """Return results without values, with the strides that the kernel's results have."""
        from torch._prims_common import compute_elementwise_output_strides

        tensors = torch.broadcast_tensors(*tensors)
        strides = compute_elementwise_output_strides(*tensors)
        results = tuple(tensors[0].new_empty_strided(tensors[0].shape, strides) for _ in self._results)
        return results if len(results) > 1 else results[0]


class _Node(Function):
    """A kernel and its gradient, as one node of the autograd graph."""

    @staticmethod
    def forward(ctx: Any, function: Elementwise, *tensors: Tensor) -> Any:
        ctx.function = function
        ctx.save_for_backward(*tensors)
        results = function.operator(*tensors)
        return (*tensors[: function.unchanged], *_several(results)) if function.unchanged else results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found = _several(ctx.function.gradient(*gradients, *ctx.saved_tensors))
        wanted = zip(found, ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        return None, *(g.sum_to_size(t.shape) if needed else None for g, t, needed in wanted)


def _several(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


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
