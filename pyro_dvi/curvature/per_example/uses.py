# SPDX-License-Identifier: Apache-2.0
"""The recorder of weight uses: the functions that a model calls with its weights, or with parts of them."""

import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.overrides import TorchFunctionMode

from pyro_dvi.core.weight_parts import Part, WeightParts, name_of
from pyro_dvi.curvature.per_example.example_rules import (
    Arguments,
    Contribution,
    Rows,
    contribution,
    has_rule,
    possible_rows,
    to_whole_weight,
)

# Questions about a tensor, which do not use its values (unless they return a tensor, as ``w.T`` does).
_QUESTIONS = {"size", "dim", "numel", "is_floating_point", "is_complex", "stride", "is_contiguous"}


class WeightRecorder(TorchFunctionMode):
    """Notice the functions that are called with weights, matched by identity, while the model runs.

    Attributes:
        parts: the weights and what was made of them by moving their elements.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parts = WeightParts()

    def noted(self, func: Callable, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """Note a call, before it is asked whether weights are among its arguments."""

    def used(
        self,
        func: Callable,
        args: tuple,
        kwargs: dict[str, Any],
        output: Any,
        found: list[tuple[int | str | None, Part]],
    ) -> None:
        """Note a call with weights at places among its arguments, which does not only move their elements."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:  # made of functions with rules
            with self:
                return _attention(*args, **kwargs)
        output = func(*args, **kwargs)
        self.noted(func, args, kwargs, output)
        found = self.parts.among(args, kwargs)
        if found and not self.parts.follow(func, args, kwargs, output, found[0][1]):
            self.used(func, args, kwargs, output, found)
        return output


# Attention with functions that do not ask for recorders: these are called with the functions inside of it.
_attention = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    {**F.multi_head_attention_forward.__globals__, "has_torch_function": lambda tensors: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)


@dataclass(frozen=True, eq=False)
class Use:
    """One use of a weight by a function that has a rule.

    Attributes:
        function: the torch function.
        place: position or name of the weight among its arguments.
        arguments: all arguments, as rules shall see them.
        part: the elements of the weight that were used.
        shape: shape of the output.
        output: the place in the graph: an edge, since a later in-place function would move the tensor on; or means.
        rows: where examples are in the output; None: not decided.
    """

    function: Callable
    place: int | str
    arguments: Arguments
    part: Part
    shape: torch.Size
    output: Any
    rows: Rows | None = None

    def at(self, rows: Rows) -> "Use":
        """Return the use with another place of the examples."""
        return self if rows == self.rows else replace(self, rows=rows)

    def candidates(self, examples: int) -> "Iterator[Use]":
        """Give the use with each place of the examples for which it has a rule."""
        for rows in possible_rows(self.shape, examples):
            use = self.at(rows)
            if use._contribution is not None:
                yield use

    @property
    def contribution(self) -> Contribution:
        """What each example adds to the weight's gradient, from ``arranged`` gradients of the output."""
        assert self._contribution is not None
        return self._contribution

    @cached_property
    def _contribution(self) -> Contribution | None:
        assert self.rows is not None
        found = contribution(self.function, self.place, self.arguments, self.rows, self.shape)
        return None if found is None else to_whole_weight(found, self.part)

    def arranged(self, delta: Tensor) -> Tensor:
        """Return the gradient of the output with examples in its first dimension, in single precision at least."""
        assert self.rows is not None
        return self.rows.first(at_least_single(delta))


@dataclass
class _Weight:
    """The uses of a weight by functions with a rule, and the first function without one."""

    uses: list[Use] = field(default_factory=list)
    without_rule: str | None = None


class WeightUses(WeightRecorder):
    """Note every use of the given tensors while the model runs.

    Args:
        values: the tensors that the model uses; None for one that it does not use as it is.
    """

    def __init__(self, values: Sequence[Tensor | None]) -> None:
        super().__init__()
        self._weights: dict[int, _Weight] = {}
        for k, value in enumerate(values):
            if value is not None:
                self.parts.add(k, value)
                self._weights[k] = _Weight()
        self._normalised: list[
            tuple[Node, Tensor]
        ] = []  # batch normalisation in training mode, with its input

    def uses(self) -> dict[int, list[Use]]:
        """Return the uses of the tensors that are used by functions with a rule only."""
        return {
            k: weight.uses for k, weight in self._weights.items() if weight.uses and not weight.without_rule
        }

    def served(self, num_examples: int) -> dict[int, list[Use]]:
        """Return the uses of those whose every use may give the gradients of single examples."""
        return with_rows_of_examples(self.uses(), num_examples)

    def constant_statistics(self) -> AbstractContextManager[None]:
        """Backward passes in this context let batch normalisation keep rows apart."""
        return constant_statistics(self._normalised)

    def obstacle(self, k: int) -> str:
        """Say why tensor ``k`` is not served."""
        weight = self._weights.get(k)
        if weight is None:
            return "is transformed before the model uses it"
        names = ", ".join(dict.fromkeys(name_of(use.function) for use in weight.uses))
        if weight.without_rule is None and not weight.uses:
            return "is not used by any function that records gradients"
        return f"is used by {weight.without_rule or names}, which has no rule for per-example gradients there"

    def prepared(self, argument: Any) -> Any:
        """Return an argument as rules shall see it."""
        return at_least_single(argument) if isinstance(argument, Tensor) else argument

    def noted(self, func: Callable, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        if name_of(func) == "batch_norm" and output.grad_fn is not None:
            if args[5] if len(args) > 5 else kwargs.get("training", False):
                self._normalised.append((output.grad_fn, args[0] if args else kwargs["input"]))

    def used(
        self,
        func: Callable,
        args: tuple,
        kwargs: dict[str, Any],
        output: Any,
        found: list[tuple[int | str | None, Part]],
    ) -> None:
        if not isinstance(output, Tensor):
            if name_of(func) in _QUESTIONS or getattr(func, "__name__", "") == "__get__":
                return
        elif not output.requires_grad:  # inside no_grad: a constant of the model
            return
        prepared = {name: self.prepared(a) for name, a in kwargs.items()}
        arguments = Arguments(tuple(map(self.prepared, args)), prepared, tuple(p for p, _ in found))
        for place, part in found:
            weight = self._weights[part.key]
            if place is not None and isinstance(output, Tensor) and has_rule(func):
                edge = get_gradient_edge(output)
                weight.uses.append(Use(func, place, arguments, part, output.shape, edge))
            elif weight.without_rule is None:
                weight.without_rule = name_of(func)


def with_rows_of_examples(uses: dict[int, list[Use]], num_examples: int) -> dict[int, list[Use]]:
    """Keep the tensors whose every use has so many examples in a dimension, the likeliest; a proof decides."""
    found = {k: [next(use.candidates(num_examples), None) for use in calls] for k, calls in uses.items()}
    return {k: [use for use in calls if use is not None] for k, calls in found.items() if all(calls)}


def at_least_single(x: Tensor) -> Tensor:
    """Half-precision numbers, as under autocast, in single precision: squares would overflow or vanish."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


@contextmanager
def constant_statistics(normalised: Iterable[tuple[Node, Tensor]]) -> Iterator[None]:
    """Let no gradient pass through the statistics of batch normalisation in training mode.

    Its weight is left out, too, which keeps no rows apart.

    Args:
        normalised: places in the graph, with what was normalised there.

    Example:
        >>> x = torch.tensor([[1.0], [3.0]], requires_grad=True)
        >>> y = torch.nn.functional.batch_norm(x, None, None, training=True)
        >>> with constant_statistics([(y.grad_fn, x)]):
        ...     torch.autograd.grad(y[0, 0], x)[0][1]
        tensor([0.])
    """
    handles = [node.register_hook(partial(_divided, x)) for node, x in normalised]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _divided(x: Tensor, inputs: tuple[Tensor | None, ...], outputs: tuple[Tensor, ...]) -> tuple | None:
    """The gradient of an output divided by the standard deviation of its channel, as gradient of the input ``x``."""
    if inputs[0] is None:
        return None
    variance = x.detach().var([k for k in range(x.dim()) if k != 1], correction=0, keepdim=True)
    return (outputs[0].to(x.dtype) * (variance + 1e-5).rsqrt(), *inputs[1:])
