# SPDX-License-Identifier: Apache-2.0
r"""Sums of squared per-example gradients, :math:`\sum_i (\partial_u \ell_i)^2`, that can be differentiated again.

While the model runs, :class:`PerExampleRecorder` notes where each latent weight is used. The gradient of example i
is then an outer product of that layer's input and output gradient, and no pass per example is needed. Weights used
in any other way are served by one backward pass per example: exact for every model, slow for many examples.

Adding a rule: write a function ``(arguments of the call, position of the weight, output gradient)`` returning
per-example gradients of shape ``[M, *weight.shape]`` and register it with :func:`per_example_rule`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from pyro_dvi.curvature.likelihood import Linearisation
from pyro_dvi.registry import registering

__all__ = [
    "PerExampleRecorder",
    "is_question",
    "nested_arguments",
    "per_example_rule",
    "per_example_rule_of",
    "summed_squared_gradients",
]

_RULES: dict[Callable, Callable] = {}
# Questions about a tensor, which do not use its values (unless they return a tensor, as ``w.T`` does).
_HARMLESS = {"__get__", "size", "dim", "numel", "is_floating_point", "is_complex", "stride", "is_contiguous"}
_CHUNK = 64  # examples per vectorised backward pass of the fallback


def per_example_rule(*functions: Callable) -> Callable[[Callable], Callable]:
    """Register the per-example gradient of torch ``functions`` with respect to a weight among their arguments."""
    return registering(_RULES, functions)


@dataclass
class _Use:
    rule: Callable
    arguments: tuple
    position: int
    shape: torch.Size
    output: GradientEdge  # not the tensor, which a later in-place function would move on in the graph


class PerExampleRecorder(TorchFunctionMode):
    """Note every use of the given tensors, matched by identity, while the model runs."""

    def __init__(self, used_values: Sequence[Tensor | None]) -> None:
        super().__init__()
        self._index = {id(v): k for k, v in enumerate(used_values) if v is not None}
        self.uses: dict[int, list[_Use]] = {k: [] for k in self._index.values()}

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        found = [(p, self._index[id(a)]) for p, a in enumerate(args) if id(a) in self._index]
        found += [(-1, self._index[id(a)]) for a in nested_arguments(args, kwargs) if id(a) in self._index]
        is_tensor = isinstance(output, Tensor)
        if not found or is_question(func, output):
            return output
        if is_tensor and not output.requires_grad:  # inside no_grad: a constant of the model
            return output
        rule = _RULES.get(func)
        for position, k in found:
            if rule is None or kwargs or not is_tensor or position < 0:
                self.uses.pop(k, None)
            elif k in self.uses:
                self.uses[k].append(_Use(rule, args, position, output.shape, get_gradient_edge(output)))
        return output


def per_example_rule_of(function: Callable) -> Callable | None:
    """Return the per-example gradient of a torch function, or None."""
    return _RULES.get(function)


def is_question(function: Callable, output: Any) -> bool:
    """Whether a call only asks for the shape or type of a tensor."""
    return getattr(function, "__name__", "") in _HARMLESS and not isinstance(output, Tensor)


def nested_arguments(args: tuple, kwargs: dict) -> list[Any]:
    """Return arguments by keyword and inside lists, as of ``torch.cat``."""
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, (list, tuple))]
    return [*kwargs.values(), *(a for part in lists for a in part)]


def summed_squared_gradients(likelihood: Linearisation, outputs: Tensor, cotangent: Tensor) -> list[Tensor]:
    r"""Return :math:`\sum_i (w_i\,\partial_u f_i)^2` for every latent, differentiable in the means.

    Status: exact for the fallback. The layer-wise rules attribute to example i what passes through its own row
    of the activations; the two differ only where rows are coupled, as by batch normalisation in training mode.

    Args:
        likelihood: the linearisation, run under a :class:`PerExampleRecorder` for the fast rules.
        outputs: f, one entry per example; gradients flow to the latent means.
        cotangent: w of the same shape; may depend on the means as well.
    """
    if not outputs.requires_grad:  # everything is masked, or no latent reaches the observed site
        return [torch.zeros_like(u) for u in likelihood.values]
    found: dict[int, Tensor] = {}
    if isinstance(likelihood.recorder, PerExampleRecorder) and outputs.dim() == 1:
        found = _by_layer(likelihood.recorder.uses, outputs, cotangent)
    rest = [k for k in range(len(likelihood.values)) if k not in found]
    if rest:
        values = [likelihood.values[k] for k in rest]
        found.update(zip(rest, _one_pass_per_example(outputs, cotangent, values), strict=True))
    return [found[k].reshape(u.shape) for k, u in enumerate(likelihood.values)]


def _by_layer(uses: dict[int, list[_Use]], outputs: Tensor, cotangent: Tensor) -> dict[int, Tensor]:
    """Sums for the weights whose every use has a rule and keeps the examples in its rows."""
    covered = {
        k: calls for k, calls in uses.items() if calls and all(c.shape[:1] == outputs.shape for c in calls)
    }
    edges = [call.output for calls in covered.values() for call in calls]
    if not edges:
        return {}
    deltas = iter(torch.autograd.grad(outputs, edges, cotangent, create_graph=True, allow_unused=True))
    found = {}
    for k, calls in covered.items():
        per_call = [(call, next(deltas)) for call in calls]
        gradients = [c.rule(c.arguments, c.position, delta) for c, delta in per_call if delta is not None]
        if gradients and all(gradient is not None for gradient in gradients):
            found[k] = sum(gradients[1:], gradients[0]).square().sum(0)
    return found


def _one_pass_per_example(outputs: Tensor, cotangent: Tensor, values: list[Tensor]) -> list[Tensor]:
    outputs, cotangent = outputs.reshape(-1), cotangent.reshape(-1)
    totals = [torch.zeros_like(v) for v in values]
    for start in range(0, len(outputs), _CHUNK):
        rows = torch.arange(start, min(start + _CHUNK, len(outputs)), device=outputs.device)
        seeds = F.one_hot(rows, len(outputs)).to(outputs) * cotangent
        grads = torch.autograd.grad(
            outputs, values, seeds, is_grads_batched=True, create_graph=True, allow_unused=True
        )
        totals = [t if g is None else t + g.square().sum(0) for t, g in zip(totals, grads, strict=True)]
    return totals


@per_example_rule(F.linear)
def _linear(arguments: tuple, position: int, delta: Tensor) -> Tensor | None:
    x = arguments[0]
    if x.dim() < 2:  # a single row: the output's first dimension is that of the layer
        return None
    if position == 1:
        return torch.einsum("b...o,b...i->boi", delta, x)
    return delta.reshape(len(delta), -1, delta.shape[-1]).sum(1) if position == 2 else None


@per_example_rule(torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.Tensor.mm)
def _matmul(arguments: tuple, position: int, delta: Tensor) -> Tensor | None:
    x, weight = arguments[:2]
    if position != 1 or x.dim() < 2:
        return None
    if weight.dim() == 1:
        return torch.einsum("b...,b...i->bi", delta, x)
    return torch.einsum("b...o,b...i->bio", delta, x) if weight.dim() == 2 else None


@per_example_rule(torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__)
def _add(arguments: tuple, position: int, delta: Tensor) -> Tensor | None:
    bias = arguments[position]
    if bias.dim() >= delta.dim() or bias.shape != delta.shape[delta.dim() - bias.dim() :]:
        return None
    return delta.reshape(len(delta), -1, *bias.shape).sum(1)


@per_example_rule(F.conv1d, F.conv2d)
def _convolution(arguments: tuple, position: int, delta: Tensor) -> Tensor | None:
    defaults = (None, None, None, 1, 0, 1, 1)
    call: tuple[Any, ...] = arguments + defaults[len(arguments) :]
    x, weight, _, stride, padding, dilation, groups = call
    if x.dim() != weight.dim():  # a single picture
        return None
    if position == 2:
        return delta.flatten(2).sum(2)
    if position != 1 or isinstance(padding, str):
        return None
    n = weight.dim() - 2
    kernel = weight.shape[2:]
    stride, padding = _per_dimension(stride, n), _per_dimension(padding, n)
    dilation = _per_dimension(dilation, n)
    if n == 1:  # a picture of height one
        x, kernel = x.unsqueeze(2), torch.Size((1, *kernel))
        stride, padding, dilation = (1, *stride), (0, *padding), (1, *dilation)
    patches = F.unfold(x, kernel, dilation, padding, stride)  # [M, C·k, positions]
    grouped = patches.reshape(len(x), groups, -1, patches.shape[-1])
    delta = delta.reshape(len(x), groups, -1, patches.shape[-1])
    return torch.einsum("bgol,bgil->bgoi", delta, grouped).reshape(len(x), *weight.shape)


def _per_dimension(value: int | tuple[int, ...], n: int) -> tuple[int, ...]:
    return (value,) * n if isinstance(value, int) else tuple(value) * (n if len(value) == 1 else 1)
