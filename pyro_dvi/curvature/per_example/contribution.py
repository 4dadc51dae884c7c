# SPDX-License-Identifier: Apache-2.0
"""The table of rules that say what an example contributes to the gradient of a weight."""

import inspect
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from pyro_dvi.core.registry import registering

_RULES: dict[Callable, Callable] = {}
_PARAMETERS: dict[Callable, tuple[str, ...]] = {}


def per_example_rule(*functions: Callable) -> Callable[[Callable], Callable]:
    """Register per-example gradients of torch ``functions`` with respect to a weight among their arguments.

    The rule has the parameters of the torch function, after ``wanted``: the name of the parameter that is the weight.
    It returns a :class:`Contribution`; or None where it does not apply, and then the weight is served by a backward
    pass per example.

    Example:
        >>> import torch
        >>> @per_example_rule(torch.dot)
        ... def of_dot(wanted, input, tensor):
        ...     return None  # a sum over all entries keeps no examples apart
    """
    return registering(_RULES, functions)


@dataclass(frozen=True)
class Outer:
    r"""Gradients :math:`g_i = \sum_t \delta_{it} a_{it}^\top` of a weight, or their transpose.

    Attributes:
        inputs: a as ``[M, T, q]`` from the operands of the contribution.
        deltas: :math:`\delta` as ``[M, T, p]`` from the gradient of the output.
        inputs_first: the weight is laid out as ``[q, p]`` and not as ``[p, q]``.
    """

    inputs: Callable[..., Tensor]
    deltas: Callable[[Tensor], Tensor]
    inputs_first: bool = False


@dataclass(frozen=True)
class Contribution:
    r"""What each example adds to the gradient of a weight, :math:`g_i = f(\delta_i, x_i)`.

    Attributes:
        function: f, from the gradient :math:`\delta` of the output and the operands to ``[M, *weight.shape]``. Some
            curvatures differentiate what it returns, so it consists of differentiable functions.
        operands: what :math:`\delta` is multiplied with, with examples in the first dimension as there.
        sum_of_squares: :math:`\sum_i g_i^2` from the same arguments, where that is cheaper than squares of the
            gradients. It need not be differentiable.
        outer: what gradients are made of where they are sums of outer products. It spares others the gradients
            themselves: Kronecker factors, products between layers, the rows of some examples only.
        bilinear: whether the output is linear in the operands and linear in the weight, so that both may stand for
            means. That of an activation function with a learned slope is not.
    """

    function: Callable[..., Tensor]
    operands: tuple[Tensor, ...] = ()
    sum_of_squares: Callable[..., Tensor] | None = None
    outer: Outer | None = None
    bilinear: bool = True

    def part(self, rows: slice) -> "Contribution":
        """Return what some examples add."""
        return replace(self, operands=tuple(operand[rows] for operand in self.operands))

    def gradients(self, delta: Tensor) -> Tensor:
        """Return :math:`g_i` of all examples."""
        return self.function(delta, *self.operands)

    def squares(self, delta: Tensor) -> Tensor:
        """Return the sum of their squares."""
        if self.sum_of_squares is not None:
            return self.sum_of_squares(delta, *self.operands)
        return self.gradients(delta).square().sum(0)

    def outer_inputs(self, part: slice) -> Tensor:
        """Return a of some examples, ``[m, T, q]``."""
        assert self.outer is not None
        return self.outer.inputs(*self.part(part).operands)


def per_example_functions() -> Set[Callable]:
    """Return the functions that have a rule."""
    return _RULES.keys()


def contribution(
    function: Callable, place: int | str, args: tuple, kwargs: dict[str, Any]
) -> Contribution | None:
    """Return what examples add to the gradient of one argument of a call; None if no rule says so.

    Args:
        function: what was called.
        place: position or name of the argument that is the weight.
        args: arguments of the call.
        kwargs: likewise.
    """
    rule = _RULES.get(function)
    if rule is None:
        return None
    names = _parameters(rule)
    if len(args) > len(names) or not kwargs.keys() <= set(names):
        return None
    return rule(names[place] if isinstance(place, int) else place, *args, **kwargs)


def _parameters(rule: Callable) -> tuple[str, ...]:
    """Names of the parameters of a rule's torch function."""
    names = _PARAMETERS.get(rule)
    if names is None:
        parameters = list(inspect.signature(rule).parameters.values())[1:]
        names = tuple(p.name for p in parameters)
        if parameters and parameters[-1].kind is inspect.Parameter.VAR_POSITIONAL:
            names = (*names[:-1], *(f"{names[-1]}{k}" for k in range(16)))
        _PARAMETERS[rule] = names
    return names
