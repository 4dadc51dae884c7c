# SPDX-License-Identifier: Apache-2.0
"""Where a model uses its weights."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.overrides import TorchFunctionMode

from pyro_dvi.curvature.per_example.contribution import Contribution, contribution
from pyro_dvi.curvature.rows import constant_statistics

# Questions about a tensor, which do not use its values (unless they return a tensor, as ``w.T`` does).
_HARMLESS = {"__get__", "size", "dim", "numel", "is_floating_point", "is_complex", "stride", "is_contiguous"}


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
        self._normalised: list[
            tuple[Node, Tensor]
        ] = []  # batch normalisation in training mode, with its input

    def uses(self) -> dict[int, list[Use]]:
        """Return the uses of the tensors that have a rule for every use."""
        return {
            k: weight.uses for k, weight in self._weights.items() if weight.uses and not weight.without_rule
        }

    def served(self, num_examples: int) -> dict[int, list[Use]]:
        """Return the uses of those whose every use has the examples in its first dimension."""
        return with_examples_first(self.uses(), num_examples)

    def constant_statistics(self) -> AbstractContextManager[None]:
        """Backward passes in this context let batch normalisation keep rows apart."""
        return constant_statistics(self._normalised)

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
        return f"is used by {names}, which does not give the gradients of single examples there"

    def prepared(self, argument: Any) -> Any:
        """Return an argument as rules shall see it."""
        return at_least_single(argument) if isinstance(argument, Tensor) else argument

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if _name(func) == "batch_norm" and _in_training(args, kwargs) and output.grad_fn is not None:
            self._normalised.append((output.grad_fn, args[0] if args else kwargs["input"]))
        found = _places(args, kwargs, self._index)
        if not found or _is_question(func, output):
            return output
        if isinstance(output, Tensor) and not output.requires_grad:  # inside no_grad: a constant of the model
            return output
        kwargs = {name: self.prepared(a) for name, a in kwargs.items()}
        args = tuple(map(self.prepared, args))
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
        if place is None or not isinstance(output, Tensor):
            return None
        found = contribution(func, place, args, kwargs)
        return None if found is None else Use(func, found, output.shape, get_gradient_edge(output))


def _places(args: tuple, kwargs: dict, index: dict[int, int]) -> list[tuple[int | str | None, int]]:
    """Where the watched tensors are among the arguments of a call: position, name, or None within a list."""
    named = [*enumerate(args), *kwargs.items()]
    found: list[tuple[int | str | None, int]] = [(p, index[id(a)]) for p, a in named if id(a) in index]
    lists = [a for _, a in named if isinstance(a, (list, tuple))]
    return found + [(None, index[id(a)]) for part in lists for a in part if id(a) in index]


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


def _is_question(function: Callable, output: Any) -> bool:
    return _name(function) in _HARMLESS and not isinstance(output, Tensor)


def _name(function: Callable) -> str:
    return getattr(function, "__name__", str(function))


def _in_training(args: tuple, kwargs: dict) -> bool:
    return bool(args[5] if len(args) > 5 else kwargs.get("training", False))
