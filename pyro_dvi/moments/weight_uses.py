# SPDX-License-Identifier: Apache-2.0
"""Which functions use the latent weights, as seen while a model runs with moments."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.moments.value import GaussianMoments

__all__ = ["WeightUses", "leaves_of", "parts_of"]

# What gives the elements of a weight another place, each once: the result is the weight again.
_MOVES = frozenset(
    "t T mT transpose swapaxes swapdims permute movedim moveaxis view reshape flatten ravel unflatten squeeze "
    "unsqueeze chunk split split_with_sizes tensor_split unbind __iter__ clone contiguous detach".split()
)


class WeightUses:
    """Recognise weights among the arguments of a function, by identity.

    Args:
        weights: latent weights by name; may be filled while the model runs.

    Attributes:
        used: identities of weights that a function has used.
        composite: functions whose rule calls others, which are seen one by one.
    """

    composite = frozenset(["multi_head_attention_forward"])

    def __init__(self, weights: Mapping[str, GaussianMoments]) -> None:
        self.weights = weights
        self.used: set[int] = set()
        self._names: dict[int, str] = {}
        self._moved: list[tuple[GaussianMoments, str]] = []  # kept, so that their identities stay taken
        self._parts: dict[int, list[int]] = {}  # identities of what was moved, by the weight's
        self._taken: dict[int, Tensor] = {}  # elements of a weight that indices have taken

    def found(
        self, func: Callable, args: tuple, kwargs: dict[str, Any], result: Any
    ) -> list[tuple[int, str]]:
        """Return identities and names of the weights that a call uses; none if it only moves their elements."""
        names = self.names()
        found = [(id(a), names[id(a)]) for a in leaves_of(args, kwargs) if id(a) in names]
        name = getattr(func, "__name__", "").strip("_")
        if name in self.composite:
            return [(key, name) for key, name in found if key not in self.used]
        if len(found) == 1 and self._moves(name, args, found[0][0]):
            self.used.add(found[0][0])
            for part in parts_of(result):
                self._moved.append((part, found[0][1]))
                names[id(part)] = found[0][1]
                self._parts.setdefault(found[0][0], []).append(id(part))
            return []
        return found

    def _moves(self, function: str, args: tuple, key: int) -> bool:
        """Whether a function gives other places to elements of a weight that nothing has used yet."""
        if function == "getitem" and id(args[0]) == key and _takes_each_once(args[1]):
            elements = torch.zeros(args[0].shape, dtype=torch.bool)
            taken = self._taken.setdefault(key, elements.clone())
            elements[args[1]] = True
            if bool((taken & elements).any()) or (key in self.used and not taken.any()):
                return False
            taken |= elements
            return True
        return function in _MOVES and key not in self.used

    def names(self) -> dict[int, str]:
        """Names of weights by identity."""
        if len(self._names) != len(self.weights) + len(self._moved):
            self._names = {id(weight): name for name, weight in self.weights.items()}
            self._names.update({id(part): name for part, name in self._moved})
        return self._names


def _takes_each_once(index: Any) -> bool:
    indices = index if isinstance(index, tuple) else (index,)
    return all(i is None or i is Ellipsis or isinstance(i, int | slice) for i in indices)


def parts_of(result: Any) -> Iterator[GaussianMoments]:
    """Moments that a function returned."""
    for part in result if isinstance(result, tuple | list) else (result,):
        if isinstance(part, GaussianMoments):
            yield part


def leaves_of(args: tuple, kwargs: dict[str, Any]) -> Iterator[Any]:
    """Arguments of a call, those in lists one by one."""
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, list | tuple):
            yield from argument
        else:
            yield argument
