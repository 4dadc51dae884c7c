# SPDX-License-Identifier: Apache-2.0
"""Recognise weights among the arguments of functions, even after their elements were moved, as in ``w.T`` and ``w[0]``.

This record is shared by everything that tracks weights through a model: per-example gradients, the input units of
weights, and the warning about repeated uses.
"""

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Functions that move elements of their first argument, each at most once.
_MOVES = frozenset(
    "t T mT transpose swapaxes swapdims permute movedim moveaxis view reshape flatten ravel unflatten squeeze "
    "unsqueeze chunk split split_with_sizes tensor_split unbind clone contiguous detach select narrow".split()
)


@dataclass(frozen=True, eq=False)
class Part:
    """Some elements of a weight, in the shape of a value that the model computed from the weight.

    Attributes:
        key: the weight.
        value: the value, kept alive so that its id is not reused.
        shape: shape of the weight.
        places: position of each element of the value in the flattened weight; None for the weight itself.
        turned: True if the value is the transpose of a matrix.
    """

    key: Any
    value: Any
    shape: torch.Size
    places: Tensor | None = None
    turned: bool = False

    @property
    def indices(self) -> Tensor:
        """The flat positions in the weight, in the shape of the value."""
        return torch.arange(self.shape.numel()).reshape(self.shape) if self.places is None else self.places

    def overlaps(self, other: "Part") -> bool:
        """Return True if two parts of one weight have an element in common."""
        if self.places is None or other.places is None:
            return True
        return bool(torch.isin(self.places, other.places).any())


Places = list[tuple[int | str | None, Part]]
"""Parts among the arguments of a call, with their position or name (None within a list)."""


class WeightParts:
    """Weights and their parts, by the identity of the value."""

    def __init__(self) -> None:
        self._parts: dict[int, Part] = {}

    def add(self, key: Any, value: Any) -> None:
        """Register a weight, so that it is recognised from now on."""
        self._parts.setdefault(id(value), Part(key, value, value.shape))

    def add_like(self, part: Part, value: Any) -> None:
        """Recognise a value that has the same elements of the weight, in the same positions, as a known part."""
        self._parts.setdefault(id(value), replace(part, value=value))

    def among(self, args: tuple, kwargs: dict[str, Any]) -> Places:
        """Return the parts among the arguments of a call."""
        named: list[tuple[int | str | None, Any]] = [*enumerate(args), *kwargs.items()]
        parts, lists = self._parts, [a for _, a in named if isinstance(a, list | tuple)]
        found = [(p, parts[id(a)]) for p, a in named if id(a) in parts]
        return found + [(None, parts[id(a)]) for several in lists for a in several if id(a) in parts]

    def follow(self, func: Callable, args: tuple, kwargs: dict[str, Any], result: Any, part: Part) -> bool:
        """Recognise the result of a call that only moves elements of a part; return False for any other call."""
        name = name_of(func)
        if not args or args[0] is not part.value:
            return False
        if name not in _MOVES and not (name == "getitem" and _takes_each_once(args[1])):
            return False
        if isinstance(result, Tensor) and part.value.requires_grad and not result.requires_grad:
            return False  # the result is detached
        moved = func(part.indices, *args[1:], **kwargs)
        turned = part.places is None and len(part.shape) == 2 and name in ("t", "T", "mT", "transpose")
        for value, places in zip(several(result), several(moved), strict=True):
            self._parts[id(value)] = Part(part.key, value, part.shape, places, turned)
        return True


class WeightRecorder(TorchFunctionMode):
    """While the model runs, record calls of functions with weights, which are recognised by identity.

    Attributes:
        parts: the weights, and values computed by moving their elements.
        others: functions to record even without weights.
    """

    others: ClassVar[frozenset[Callable]] = frozenset()

    def __init__(self) -> None:
        super().__init__()
        self.parts = WeightParts()

    def used(self, func: Callable, args: tuple, kwargs: dict[str, Any], output: Any, found: Places) -> None:
        """Record a call with weights among its arguments that does more than move their elements."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:  # composed of functions with rules
            with self:
                return _attention(*args, **kwargs)
        output = func(*args, **kwargs)
        found = self.parts.among(args, kwargs)
        moves = found and self.parts.follow(func, args, kwargs, output, found[0][1])
        if (found and not moves) or func in self.others:
            self.used(func, args, kwargs, output, found)
        return output


# A copy of torch's attention that does not dispatch as a whole, so that recorders see the functions inside.
_attention = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    {**F.multi_head_attention_forward.__globals__, "has_torch_function": lambda tensors: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)


def name_of(func: Callable) -> str:
    """Return the name of a torch function, method or attribute without underscores: "T", "getitem", "add"."""
    name: str = getattr(func, "__name__", str(func))
    if name == "__get__":
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return name.strip("_")


def several(result: Any) -> Sequence[Any]:
    """Return the result of a function as a sequence, even if it is a single value."""
    return result if isinstance(result, tuple | list) else (result,)


def _takes_each_once(index: Any) -> bool:
    indices = index if isinstance(index, tuple) else (index,)
    return all(i is None or i is Ellipsis or isinstance(i, int | slice) for i in indices)
