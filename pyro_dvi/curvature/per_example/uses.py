# SPDX-License-Identifier: Apache-2.0
"""Where a model uses its weights, and the table of rules that say what an example contributes there."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from pyro_dvi.registry import registering

__all__ = [
    "Contribution",
    "Outer",
    "Use",
    "WeightUses",
    "at_least_single",
    "per_example_rule",
    "with_examples_first",
]

_RULES: dict[Callable, Callable] = {}
# Questions about a tensor, which do not use its values (unless they return a tensor, as ``w.T`` does).
_HARMLESS = {"__get__", "size", "dim", "numel", "is_floating_point", "is_complex", "stride", "is_contiguous"}


def per_example_rule(*functions: Callable) -> Callable[[Callable], Callable]:
    """Register per-example gradients of torch ``functions`` with respect to a weight among their arguments.

    The rule has the parameters of the torch function, after ``wanted``: the name of the parameter that is the weight.
    It returns a :class:`Contribution`; or None where it does not apply, and then the weight is served by a backward
    pass per example.

    Example:
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
    """

    function: Callable[..., Tensor]
    operands: tuple[Tensor, ...] = ()
    sum_of_squares: Callable[..., Tensor] | None = None
    outer: Outer | None = None

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
        return self.outer.inputs(*(operand[part] for operand in self.operands))


@dataclass(frozen=True)
class Use:
    """One use of a weight.

    Attributes:
        function: the torch function.
        contribution: what examples add to the weight's gradient there.
        shape: shape of the output.
        output: the place in the graph; not the tensor, which a later in-place function would move on.
    """

    function: Callable
    contribution: Contribution
    shape: torch.Size
    output: GradientEdge


@dataclass
class _Weight:
    """What happened to a weight: its uses with a rule, and the first function without one."""

    uses: list[Use] = field(default_factory=list)
    without_rule: str | None = None


class WeightUses(TorchFunctionMode):
    """Note every use of the given tensors, matched by identity, while the model runs.

    Args:
        values: the tensors that the model uses; None for one that it does not use as it is.
    """

    def __init__(self, values: Sequence[Tensor | None]) -> None:
        super().__init__()
        self._index = {id(v): k for k, v in enumerate(values) if v is not None}
        self._weights = {k: _Weight() for k in self._index.values()}
        self.couples_rows = False  # batch normalisation in training mode was used

    def uses(self) -> dict[int, list[Use]]:
        """Return the uses of the tensors that have a rule for every use."""
        return {
            k: weight.uses for k, weight in self._weights.items() if weight.uses and not weight.without_rule
        }

    def served(self, num_examples: int) -> dict[int, list[Use]]:
        """Return the uses of those whose every use has the examples in its first dimension."""
        return with_examples_first(self.uses(), num_examples)

    def obstacle(self, k: int) -> str:
        """Say why tensor ``k`` is not served."""
        weight = self._weights.get(k)
        if weight is None:
            return "is transformed before the model uses it"
        if weight.without_rule is not None:
            return f"is used by {weight.without_rule}, which has no rule for per-example gradients there"
        if not weight.uses:
            return "is not used by any function that records gradients"
        names = ", ".join(dict.fromkeys(_name(use.function) for use in weight.uses))
        return f"is used by {names}, where rows are not those of single examples"

    def prepared(self, argument: Any) -> Any:
        """Return an argument as rules shall see it."""
        return at_least_single(argument) if isinstance(argument, Tensor) else argument

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        index = self._index
        if _name(func) == "batch_norm" and _in_training(args, kwargs):
            self.couples_rows = True
        found: list[tuple[int | str | None, int]] = [
            (p, index[id(a)]) for p, a in enumerate(args) if id(a) in index
        ]
        found += [(name, index[id(a)]) for name, a in kwargs.items() if id(a) in index]
        lists = [a for a in (*args, *kwargs.values()) if isinstance(a, (list, tuple))]
        found += [(None, index[id(a)]) for part in lists for a in part if id(a) in index]
        if not found or _is_question(func, output):
            return output
        if isinstance(output, Tensor) and not output.requires_grad:  # inside no_grad: a constant of the model
            return output
        for place, k in found:
            use = self._use(func, place, args, kwargs, output)
            if use is not None:
                self._weights[k].uses.append(use)
            elif self._weights[k].without_rule is None:
                self._weights[k].without_rule = _name(func)
        return output

    def _use(
        self, func: Callable, place: int | str | None, args: tuple, kwargs: dict, output: Any
    ) -> Use | None:
        rule = _RULES.get(func)
        if rule is None or place is None or not isinstance(output, Tensor):
            return None
        names = _parameters(rule)
        if len(args) > len(names) or not kwargs.keys() <= set(names):
            return None
        wanted = names[place] if isinstance(place, int) else place
        args = tuple(self.prepared(a) for a in args)
        kwargs = {name: self.prepared(a) for name, a in kwargs.items()}
        contribution = rule(wanted, *args, **kwargs)
        if contribution is None:
            return None
        return Use(func, contribution, output.shape, get_gradient_edge(output))


def with_examples_first(uses: dict[int, list[Use]], num_examples: int) -> dict[int, list[Use]]:
    """Keep the tensors whose every use has that many rows."""
    return {
        k: calls
        for k, calls in uses.items()
        if calls and all(use.shape[:1] == (num_examples,) for use in calls)
    }


def at_least_single(x: Tensor) -> Tensor:
    """Half-precision numbers, as under autocast, in single precision: squares would overflow or vanish."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _parameters(rule: Callable) -> tuple[str, ...]:
    """Names of the parameters of a rule's torch function."""
    names = _PARAMETERS.get(rule)
    if names is None:
        names = _PARAMETERS[rule] = tuple(inspect.signature(rule).parameters)[1:]
    return names


_PARAMETERS: dict[Callable, tuple[str, ...]] = {}


def _is_question(function: Callable, output: Any) -> bool:
    return _name(function) in _HARMLESS and not isinstance(output, Tensor)


def _name(function: Callable) -> str:
    return getattr(function, "__name__", str(function))


def _in_training(args: tuple, kwargs: dict) -> bool:
    return bool(args[5] if len(args) > 5 else kwargs.get("training", False))
