# SPDX-License-Identifier: Apache-2.0
"""The origin of tensors, according to their autograd graph."""

import re
from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def graph_of(outputs: Iterable[Tensor], without: Container[str] = ()) -> set[Any]:
    """Return the nodes of the autograd graph that ``outputs`` depend on.

    Args:
        outputs: the ends of the graph.
        without: names of nodes at which the search stops.
    """
    seen: set[Any] = set()
    stack = [output.grad_fn for output in outputs]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen and node.name() not in without:
            seen.add(node)
            stack.extend(parent for parent, _ in node.next_functions)
    return seen


def graph_between(inputs: Sequence[Tensor], outputs: Iterable[Tensor]) -> set[Any]:
    """Return the nodes between ``inputs`` and ``outputs``, including the nodes of inputs that are leaves.

    Example:
        >>> a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        >>> sorted(node.name() for node in graph_between([a], [a.exp() * b.sin()]))
        ['ExpBackward0', 'MulBackward0', 'torch::autograd::AccumulateGrad']
    """
    nodes = graph_of(outputs)
    found = {node for node in nodes if any(getattr(node, "variable", None) is value for value in inputs)}
    for node in sorted(nodes - found, key=lambda node: node._sequence_nr()):  # in the order of the operations
        if any(parent in found for parent, _ in node.next_functions):
            found.add(node)
    return found


def function_of(node: Any) -> str:
    """Return the name of the function that created a node of the graph.

    Example:
        >>> x = torch.ones(1, requires_grad=True)
        >>> function_of(torch.nn.functional.leaky_relu(x).grad_fn)
        'leaky_relu'
    """
    kind = node.name().rstrip("0123456789").removesuffix("Backward")
    return "_".join(re.findall("[A-Z][a-z]+", re.sub("Kernel|WithNoise", "", kind))).lower()


def leaves_of(outputs: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters that ``outputs`` depend on."""
    return [node.variable for node in graph_of(outputs) if hasattr(node, "variable")]


def enters(values: Sequence[Tensor], outputs: Iterable[Tensor]) -> list[bool]:
    """Return, for each value, True if gradients of some output reach it.

    Example:
        >>> a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        >>> enters([a, b], [2 * a, torch.zeros(())])
        [True, False]
    """
    sums = [output.sum() for output in outputs if output.requires_grad]
    tracked = [value for value in values if value.requires_grad]
    if not sums or not tracked:
        return [False] * len(values)
    grads = iter(torch.autograd.grad(sums, tracked, allow_unused=True, retain_graph=True))
    return [value.requires_grad and next(grads) is not None for value in values]
