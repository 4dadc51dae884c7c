# SPDX-License-Identifier: Apache-2.0
"""Rules of torch functions for the contribution of an example to the gradient of a weight, and uses of weights."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.core.registry import registering
from pyro_dvi.core.weight_parts import Part

_BUDGET = 1 << 19  # maximum number of gradient entries at a time
_RULES: dict[Callable, Callable] = {}
_PARAMETERS: dict[Callable, tuple[str, ...]] = {}


def per_example_rule(*functions: Callable) -> Callable[[Callable], Callable]:
    """Register a rule for the per-example gradients of torch ``functions`` with respect to one of their arguments.

    The rule has the parameters of the torch function, preceded by ``wanted``, the name of the parameter that is the
    weight. It returns a :class:`Contribution`, or None if it does not apply. In that case, the weight needs one
    backward pass per example.

    Example:
        >>> import torch
        >>> @per_example_rule(torch.dot)
        ... def of_dot(wanted, input, tensor):
        ...     return None  # a sum over all entries does not separate examples
    """
    return registering(_RULES, functions)


@dataclass(frozen=True)
class Outer:
    r"""Gradients :math:`g_i = \sum_t \delta_{it} a_{it}^\top` of a weight, or their transpose.

    Attributes:
        inputs: function from the operands of the contribution to the inputs a, ``[M, T, q]``.
        deltas: function from the gradient of the output to :math:`\delta`, ``[M, T, p]``.
        inputs_first: whether the weight has shape ``[q, p]`` instead of ``[p, q]``.
    """

    inputs: Callable[..., Tensor]
    deltas: Callable[[Tensor], Tensor]
    inputs_first: bool = False


@dataclass(frozen=True)
class Contribution:
    r"""The contribution of each example to the gradient of a weight, :math:`g_i = f(\delta_i, x_i)`.

    Attributes:
        function: f, from the gradient :math:`\delta` of the output and the operands to ``[M, *weight.shape]``. Some
            curvatures differentiate the result, so it must be differentiable.
        operands: the tensors by which :math:`\delta` is multiplied, with the examples in their first dimension.
        sum_of_squares: function from the same arguments to :math:`\sum_i g_i^2`, if this is cheaper than squaring the
            gradients. It need not be differentiable.
        outer: the factors, if gradients are sums of outer products; used for Kronecker factors, products between layers
            and rows of some examples.
        bilinear: whether the output is linear in the operands and linear in the weight, so that both may be replaced by
            their means. This is false for an activation function with a learned slope.
    """

    function: Callable[..., Tensor]
    operands: tuple[Tensor, ...] = ()
    sum_of_squares: Callable[..., Tensor] | None = None
    outer: Outer | None = None
    bilinear: bool = True

    def part(self, rows: slice) -> "Contribution":
        """Return the contribution of some examples."""
        return replace(self, operands=tuple(operand[rows] for operand in self.operands))

    def gradients(self, delta: Tensor) -> Tensor:
        """Return :math:`g_i` of all examples."""
        return self.function(delta, *self.operands)

    def squares(self, delta: Tensor) -> Tensor:
        """Return the sum of squares of the gradients."""
        if self.sum_of_squares is not None:
            return self.sum_of_squares(delta, *self.operands)
        return self.gradients(delta).square().sum(0)

    def outer_inputs(self, part: slice) -> Tensor:
        """Return the inputs a of some examples, ``[m, T, q]``."""
        assert self.outer is not None
        return self.outer.inputs(*self.part(part).operands)


def summed_squares(left: Tensor, x: Tensor, right: Callable[[Tensor], Tensor], shape: torch.Size) -> Tensor:
    r"""Return the sum of squares of gradients :math:`\sum_t a_{it} b_{it}^\top`, formed in parts that fit into a cache.

    Args:
        left: a, of shape ``[M, *groups, p, T]``.
        x: tensor from which b is computed, with the examples in the first dimension.
        right: function from x of m examples to b, of shape ``[m, *groups, T, q]``.
        shape: shape of a gradient, ``[*groups, p, q]``.
    """
    budget, row = _BUDGET if x.device.type == "cpu" else 128 * _BUDGET, shape.numel() // shape[-2]
    count, rows = max(1, budget // (row * max(shape[-2], left.shape[-1]))), max(1, budget // row)
    total = left.new_zeros(shape)
    for some, part in zip(left.split(count), x.split(count), strict=True):
        inputs = right(part)
        for block, sums in zip(some.split(rows, -2), total.split(rows, -2), strict=True):
            if count == 1:
                one = block[0] @ inputs[0]
                sums.addcmul_(one, one)
            else:
                sums += (block @ inputs).square_().sum(0)
    return total


@dataclass(frozen=True)
class Rows:
    """A dimension that contains examples, or several rows of each example (tokens of a sentence, windows of an image).

    Attributes:
        axis: the dimension.
        examples: the number of examples.
        each: number of rows per example.
        innermost: whether examples vary faster than rows, as in ``[tokens * examples, ...]``.
    """

    axis: int
    examples: int
    each: int = 1
    innermost: bool = False

    def first(self, x: Tensor) -> Tensor:
        """Return ``[examples, ...]``; if an example has several rows, these are the second dimension."""
        if self.axis:
            x = x.movedim(self.axis, 0)
        if self.each == 1:
            return x
        if self.innermost:
            return x.unflatten(0, (self.each, self.examples)).transpose(0, 1)
        return x.unflatten(0, (self.examples, self.each))


def _possible_rows(shape: torch.Size, examples: int) -> Iterator[Rows]:
    """Yield the dimensions of an output that may be the examples, most likely first."""
    for axis, size in enumerate(shape):
        if size == examples:
            yield Rows(axis, examples)
    for axis, size in enumerate(shape):
        if size > examples and size % examples == 0:
            yield Rows(axis, examples, size // examples)
            yield Rows(axis, examples, size // examples, innermost=True)


def has_rule(function: Callable) -> bool:
    """Return whether a function has a rule; the rule may still decline the arguments of a call."""
    return function in _RULES


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call.

    Attributes:
        args: positional arguments.
        kwargs: keyword arguments.
        weights: positions and names of weights.
    """

    args: tuple
    kwargs: dict[str, Any]
    weights: tuple[int | str | None, ...] = ()

    def prepared(self, detached: bool) -> "Arguments":
        """Return the arguments as passed to rules: in at least single precision, optionally detached."""

        def of(argument: Any) -> Any:
            if not isinstance(argument, Tensor):
                return argument
            return at_least_single(argument.detach() if detached else argument)

        kwargs = {name: of(argument) for name, argument in self.kwargs.items()}
        return Arguments(tuple(map(of, self.args)), kwargs, self.weights)

    @property
    def named(self) -> list[tuple[int | str, Any]]:
        """Return all arguments with their position or name."""
        return [*enumerate(self.args), *self.kwargs.items()]

    def mapped(self, function: Callable[[Any], Any]) -> "Arguments":
        """Return the arguments, with ``function`` applied to each that is not a weight."""
        args = tuple(a if n in self.weights else function(a) for n, a in enumerate(self.args))
        kwargs = {name: a if name in self.weights else function(a) for name, a in self.kwargs.items()}
        return Arguments(args, kwargs, self.weights)


def contribution(
    function: Callable, place: int | str, arguments: Arguments, rows: Rows, shape: torch.Size
) -> Contribution | None:
    """Return the contribution of examples to the gradient of one argument of a call; None if there is no rule.

    Args:
        function: the called function.
        place: position or name of the argument that is the weight.
        arguments: arguments of the call.
        rows: the examples in the output; gradients of the output are passed as ``rows.first(delta)``.
        shape: shape of the output.
    """
    if rows == Rows(0, rows.examples):
        return _by_rule(function, place, arguments)
    lead = shape[: rows.axis + 1]
    others = [a for n, a in arguments.named if n not in arguments.weights and isinstance(a, Tensor)]
    if not any(a.shape[: len(lead)] == lead for a in others):  # no argument depends on the examples
        return None

    def by_rule(arrange: Callable[[Tensor], Tensor]) -> Contribution | None:
        arranged = arguments.mapped(
            lambda a: arrange(a) if isinstance(a, Tensor) and a.shape[: len(lead)] == lead else a
        )
        return _by_rule(function, place, arranged)

    found = by_rule(rows.first)
    if found is not None or rows.each == 1:
        return found
    found = by_rule(lambda x: rows.first(x).flatten(0, 1))  # by rows, such as the frames of a video
    return None if found is None else _of_several_rows(found, rows.each)


def _of_several_rows(of_row: Contribution, each: int) -> Contribution:
    """Return the sum of the contributions of an example's rows."""

    def gradients(delta: Tensor, *operands: Tensor) -> Tensor:
        flat = (x.flatten(0, 1) for x in (delta, *operands))
        return of_row.function(*flat).unflatten(0, (-1, each)).sum(1)

    operands = tuple(x.unflatten(0, (-1, each)) for x in of_row.operands)
    return Contribution(gradients, operands, bilinear=of_row.bilinear)


def to_whole_weight(found: Contribution, part: Part) -> Contribution:
    """Return the contribution to a weight from the contribution to a part of it."""
    if part.places is None:
        return found
    shape, places = part.shape, part.places.flatten()

    def gradients(delta: Tensor, *operands: Tensor) -> Tensor:
        of_part = found.function(delta, *operands).reshape(len(delta), -1)
        whole = of_part.new_zeros(len(of_part), shape.numel())
        return whole.index_copy(1, places.to(whole.device), of_part).reshape(len(of_part), *shape)

    def squares(delta: Tensor, *operands: Tensor) -> Tensor:
        of_part = replace(found, operands=operands).squares(delta).flatten()
        whole = of_part.new_zeros(shape.numel())
        return whole.index_copy(0, places.to(whole.device), of_part).reshape(shape)

    outer = found.outer if part.turned else None
    if outer is not None:
        outer = replace(outer, inputs_first=not outer.inputs_first)
    return Contribution(gradients, found.operands, squares, outer, found.bilinear)


def _by_rule(function: Callable, place: int | str, arguments: Arguments) -> Contribution | None:
    rule = _RULES.get(function)
    if rule is None:
        return None
    names = _parameters(rule)
    if len(arguments.args) > len(names) or not arguments.kwargs.keys() <= set(names):
        return None
    return rule(names[place] if isinstance(place, int) else place, *arguments.args, **arguments.kwargs)


def _parameters(rule: Callable) -> tuple[str, ...]:
    """Return the names of the parameters of a rule's torch function."""
    names = _PARAMETERS.get(rule)
    if names is None:
        parameters = list(inspect.signature(rule).parameters.values())[1:]
        names = tuple(p.name for p in parameters)
        if parameters and parameters[-1].kind is inspect.Parameter.VAR_POSITIONAL:
            names = (*names[:-1], *(f"{names[-1]}{k}" for k in range(16)))
        _PARAMETERS[rule] = names
    return names


# Uses of weights ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Use:
    """One use of a weight by a function that has a rule.

    Attributes:
        function: the torch function.
        place: position or name of the weight in its arguments.
        arguments: all arguments, as passed to rules.
        part: the elements of the weight that were used.
        shape: shape of the output.
        output: the edge of the output in the graph (not the tensor, which could change in place), or its means.
        rows: the examples in the output; None if not yet known.
    """

    function: Callable
    place: int | str
    arguments: Arguments
    part: Part
    shape: torch.Size
    output: Any
    rows: Rows | None = None

    def at(self, rows: Rows) -> "Use":
        """Return the use with another dimension as the examples."""
        return self if rows == self.rows else replace(self, rows=rows)

    def candidates(self, examples: int) -> "Iterator[Use]":
        """Yield the use with each possible dimension of examples for which it has a rule."""
        uses = (self.at(rows) for rows in _possible_rows(self.shape, examples))
        return (use for use in uses if use._contribution is not None)

    @property
    def contribution(self) -> Contribution:
        """Return the contribution of each example to the weight's gradient, for ``arranged`` output gradients."""
        assert self._contribution is not None
        return self._contribution

    @cached_property
    def _contribution(self) -> Contribution | None:
        assert self.rows is not None
        found = contribution(self.function, self.place, self.arguments, self.rows, self.shape)
        return None if found is None else to_whole_weight(found, self.part)

    def arranged(self, delta: Tensor) -> Tensor:
        """Return the gradient of the output with examples in its first dimension, in at least single precision."""
        assert self.rows is not None
        return self.rows.first(at_least_single(delta))


def with_rows_of_examples(uses: dict[int, list[Use]], num_examples: int) -> dict[int, list[Use]]:
    """Keep the tensors whose uses all have a dimension of ``num_examples``, and choose the most likely dimension."""
    found = {k: [next(use.candidates(num_examples), None) for use in calls] for k, calls in uses.items()}
    return {k: [use for use in calls if use is not None] for k, calls in found.items() if all(calls)}


def at_least_single(x: Tensor) -> Tensor:
    """Convert half precision (autocast) to single precision, in which squares do not overflow or vanish."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
