# SPDX-License-Identifier: Apache-2.0
r"""Sums of squared per-example gradients as a by-product of one backward pass.

While the model runs, :class:`SquaredGradients` notes each layer that uses a latent weight. In the backward pass a hook
on the layer's output sees its gradient :math:`\delta_i`, and the squares follow from it and the layer's input; for a
linear layer with one product more,

.. math:: \sum_i g_i^2 = (\delta^2)^\top x^2, \qquad g_i = \delta_i x_i^\top .

A weight that is used several times keeps its per-example gradients until the last use has come by, so that cross terms
are exact.

Adding a rule: every function with a rule in :mod:`pyro_dvi.curvature.per_example` is served. Register a sum of
squares of its own with :func:`squares_rule` where it is cheaper than squaring those gradients.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pyro_dvi.curvature.per_example import is_question, nested_arguments, per_example_rule_of
from pyro_dvi.registry import registering

__all__ = ["SquaredGradients", "squares_rule"]

_RULES: dict[Callable, Callable] = {}
Deliver = Callable[[int, Tensor], None]


def squares_rule(*functions: Callable) -> Callable[[Callable], Callable]:
    """Register a sum of squared per-example gradients of torch ``functions``.

    The rule takes (arguments of the call, position of the weight, output gradient) and returns a tensor of the weight's
    shape, or None where it does not apply.
    """
    return registering(_RULES, functions)


@dataclass
class _Call:
    """One use of a weight."""

    func: Callable
    arguments: tuple
    position: int
    output: Tensor


@dataclass
class _Weight:
    """The uses of a weight, and what has come by of them."""

    calls: list[_Call] = field(default_factory=list)
    has_rules: bool = True
    awaited: int = 0
    gradients: Tensor | None = None


class SquaredGradients(TorchFunctionMode):
    """Note the uses of the given tensors, matched by identity, while the model runs.

    Args:
        values: the tensors that the model uses; None for one that it does not use as it is.
    """

    def __init__(self, values: Sequence[Tensor | None]) -> None:
        super().__init__()
        self._index = {id(v): k for k, v in enumerate(values) if v is not None}
        self._weights = {k: _Weight() for k in self._index.values()}

    def served(self, num_examples: int) -> set[int]:
        """Return which tensors are used by functions with rules only, with the examples in their first dimension."""
        return {
            k
            for k, weight in self._weights.items()
            if weight.has_rules
            and weight.calls
            and all(call.output.shape[:1] == (num_examples,) for call in weight.calls)
        }

    def watch(self, served: set[int], deliver: Deliver) -> None:
        """Let the next backward pass deliver the sums of squares of the tensors in ``served``.

        Args:
            served: a part of what :meth:`served` returned.
            deliver: called with the index of a tensor and its sum of squares.
        """
        for k in served:
            weight = self._weights[k]
            weight.awaited = len(weight.calls)
            several = len(weight.calls) > 1
            for call in weight.calls:
                arrived = partial(
                    self._arrived, k, call.func, call.arguments, call.position, several, deliver
                )
                call.output.register_hook(arrived)
        for weight in self._weights.values():
            weight.calls = []  # hooks hold what they need; the graph must not be held twice

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        found = [(p, self._index[id(a)]) for p, a in enumerate(args) if id(a) in self._index]
        found += [(-1, self._index[id(a)]) for a in nested_arguments(args, kwargs) if id(a) in self._index]
        if not found or is_question(func, output):
            return output
        for position, k in found:
            weight = self._weights[k]
            if kwargs or position < 0 or not isinstance(output, Tensor) or per_example_rule_of(func) is None:
                weight.has_rules = False
            elif output.requires_grad:
                weight.calls.append(_Call(func, args, position, output))
        return output

    def _arrived(
        self,
        k: int,
        func: Callable,
        arguments: tuple,
        position: int,
        several: bool,
        deliver: Deliver,
        delta: Tensor,
    ) -> None:
        weight = self._weights[k]
        direct = _RULES.get(func)
        with torch.no_grad():
            squares = None if several or direct is None else direct(arguments, position, delta)
            if squares is None:
                rule = per_example_rule_of(func)
                assert rule is not None
                gradients = rule(arguments, position, delta)
                if several:
                    weight.gradients = gradients if weight.gradients is None else weight.gradients + gradients
                    weight.awaited -= 1
                    if weight.awaited:
                        return
                    gradients, weight.gradients = weight.gradients, None
                squares = gradients.square().sum(0)
            deliver(k, squares)


@squares_rule(F.linear)
def _linear(arguments: tuple, position: int, delta: Tensor) -> Tensor | None:
    x = arguments[0]
    if x.dim() != 2:
        return None
    if position == 2:
        return delta.square().sum(0)
    return delta.square().mT @ x.square() if position == 1 else None


@squares_rule(torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.Tensor.mm)
def _matmul(arguments: tuple, position: int, delta: Tensor) -> Tensor | None:
    x, weight = arguments[:2]
    if position != 1 or x.dim() != 2 or weight.dim() != 2:
        return None
    return x.square().mT @ delta.square()
