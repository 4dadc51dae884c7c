# SPDX-License-Identifier: Apache-2.0
"""Where in the output of a function the rows of each example are, and what they add to gradients of its weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from pyro_dvi.curvature.per_example import Contribution, contribution, per_example_functions
from pyro_dvi.curvature.reverse_delta.calls import Call, Slot
from pyro_dvi.curvature.rows import kept_apart
from pyro_dvi.moments.rules import rule_for
from pyro_dvi.moments.value import loc_of

Arrange = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Rows:
    """A dimension of a tensor that counts examples, or rows of examples (windows of a picture, say).

    Attributes:
        axis: the dimension.
        examples: the number of examples.
        each: rows of each example.
        innermost: whether examples vary faster than the rows of one.
    """

    axis: int
    examples: int
    each: int = 1
    innermost: bool = False

    def first(self, x: Tensor) -> Tensor:
        """Return ``[examples, ...]``; where an example has several rows, these come second."""
        x = x.movedim(self.axis, 0)
        if self.each == 1:
            return x
        if self.innermost:
            return x.unflatten(0, (self.each, self.examples)).transpose(0, 1)
        return x.unflatten(0, (self.examples, self.each))

    def by_row(self, x: Tensor) -> Tensor:
        """Return ``[examples * each, ...]``, the rows of an example one after the other."""
        return self.first(x).flatten(0, 1)


def rows_of(plain: Tensor, weighted: Tensor, weights: Tensor) -> Rows | None:
    """Return where the examples are; None if no dimension tells.

    Args:
        plain: gradient of the sum of the outputs of all examples.
        weighted: that of their weighted sum.
        weights: from :func:`~pyro_dvi.curvature.rows.row_weights`; see ``kept_apart`` there.
    """
    count = len(weights)
    for axis, size in enumerate(plain.shape):
        if size == 0 or size % count:
            continue
        for innermost in (False, True)[: 1 if size == count else 2]:
            rows = Rows(axis, count, size // count, innermost)
            if kept_apart(rows.first(plain), rows.first(weighted), weights):
                return rows
    return None


@dataclass(frozen=True)
class Shares:
    """What each example adds to the gradients of the weights of a call.

    Attributes:
        rows: where examples are in the output.
        contributions: by weight.
        arrange: brings the rows of the output into the order of the contributions.
        each: rows of an example among these.
    """

    rows: Rows
    contributions: dict[int, Contribution]
    arrange: Arrange
    each: int = 1

    def gradients(self, delta: Tensor, part: slice) -> dict[int, Tensor]:
        """Return gradients ``[m, *weight]`` of some examples from that of the output, arranged."""
        rows, found = slice(part.start * self.each, part.stop * self.each), {}
        for key, share in self.contributions.items():
            gradient = share.part(rows).gradients(delta[rows])
            found[key] = gradient.unflatten(0, (-1, self.each)).sum(1) if self.each > 1 else gradient
        return found


def shares_of(call: Call, rows: Rows) -> Shares | None:
    """Return what each example adds, by the rules for gradients of examples; None if no rule applies."""
    if _spelled(call.func) is None:
        return None
    if rows.axis == 0 and rows.each == 1:
        return _shares(call, rows, lambda x: x, 1)
    if _commutes(call, rows):
        return _shares(call, rows, rows.first, 1)
    return _shares(call, rows, rows.by_row, rows.each) if rows.axis == 0 else None


def _spelled(func: Callable) -> Callable | None:
    """The function that stands in the table for this one, as torch.matmul for the operator."""
    if func in per_example_functions():
        return func
    same = (f for f in per_example_functions() if _plain(f) == _plain(func) and rule_for(f) is rule_for(func))
    return next(same, None)


def _plain(func: Callable) -> str:
    return getattr(func, "__name__", "").strip("_")


def _shares(call: Call, rows: Rows, arrange: Arrange, each: int) -> Shares | None:
    function = _spelled(call.func)
    named: list[tuple[int | str, Any]] = [*enumerate(call.args), *call.kwargs.items()]
    places = {place: a.key for place, a in named if isinstance(a, Slot)}
    if function is None or len(places) != len(call.weights) or len(set(places.values())) < len(places):
        return None
    args, kwargs = _certain(call, rows, arrange, lambda weight: weight)
    found: dict[int, Contribution] = {}
    for place, key in places.items():
        share = contribution(function, place, args, kwargs)
        if share is None or not share.bilinear:
            return None
        found[key] = share
    return Shares(rows, found, arrange, each)


def _certain(
    call: Call, rows: Rows, arrange: Arrange, of_weight: Callable[[Tensor], Tensor]
) -> tuple[tuple, dict[str, Any]]:
    """Arguments of a call as tensors: what has the rows of the output is arranged."""
    leading = call.output.shape[: rows.axis + 1]

    def replaced(argument: Any) -> Any:
        if isinstance(argument, Slot):
            return of_weight(call.weights[argument.key].loc)
        value = loc_of(argument)
        has_rows = isinstance(value, Tensor) and value.shape[: rows.axis + 1] == leading
        return arrange(value) if has_rows else value

    arguments: tuple[tuple, dict[str, Any]] = tree_map(replaced, (call.args, call.kwargs))
    return arguments


def _commutes(call: Call, rows: Rows) -> bool:
    """Whether rearranged rows of the arguments give rearranged rows of the output, as in a linear layer.

    That is tried, with weights in which no symmetry hides that they belong to certain rows.
    """

    def irregular(weight: Tensor) -> Tensor:
        count = torch.arange(1, weight.numel() + 1, device=weight.device, dtype=weight.dtype)
        return count.sin().reshape(weight.shape)

    results = []
    for arrange in (lambda x: x, rows.first):
        args, kwargs = _certain(call, rows, arrange, irregular)
        try:
            results.append(call.func(*args, **kwargs))
        except (RuntimeError, IndexError):  # other shapes are refused
            return False
    expected, found = rows.first(results[0]), results[1]
    return expected.shape == found.shape and torch.allclose(expected, found, rtol=1e-3, atol=1e-5)
