# SPDX-License-Identifier: Apache-2.0
"""Which functions use the latent weights, as seen while a model runs with moments."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pyro_dvi.moments.value import Moments

__all__ = ["WeightUses", "parts_of"]

# What gives the elements of a weight another place, each once: the result is the weight again.
_MOVES = frozenset(
    "t T mT transpose swapaxes swapdims permute movedim moveaxis view reshape flatten ravel unflatten squeeze "
    "unsqueeze chunk split split_with_sizes tensor_split unbind __iter__ clone contiguous detach".split()
)
# Functions whose rule calls others, which are seen one by one.
_COMPOSITE = frozenset(["multi_head_attention_forward"])


class WeightUses:
    """Recognise weights among the arguments of a function, by identity.

    Args:
        weights: latent weights by name; may be filled while the model runs.

    Attributes:
        used: identities of weights that a function has used.
    """

    def __init__(self, weights: Mapping[str, Moments]) -> None:
        self.weights = weights
        self.used: set[int] = set()
        self._names: dict[int, str] = {}
        self._moved: list[tuple[Moments, str]] = []  # kept, so that their identities stay taken
        self._rows: dict[int, set[int]] = {}  # rows of a weight that slices have taken

    def found(
        self, func: Callable, args: tuple, kwargs: dict[str, Any], result: Any
    ) -> list[tuple[int, str]]:
        """Return identities and names of the weights that a call uses; none if it only moves their elements."""
        names = self.names()
        found = [(id(a), names[id(a)]) for a in _leaves(args, kwargs) if id(a) in names]
        name = getattr(func, "__name__", "").strip("_")
        if name in _COMPOSITE:
            return [(key, name) for key, name in found if key not in self.used]
        if len(found) == 1 and self._moves(name, args, found[0][0]):
            self.used.add(found[0][0])
            for part in parts_of(result):
                self._moved.append((part, found[0][1]))
                names[id(part)] = found[0][1]
            return []
        return found

    def _moves(self, function: str, args: tuple, key: int) -> bool:
        """Whether a function gives other places to elements of a weight that nothing has used yet."""
        if function == "getitem" and id(args[0]) == key and isinstance(args[1], slice) and args[0].dim() > 0:
            rows = set(range(len(args[0]))[args[1]])
            taken = self._rows.setdefault(key, set())
            if taken & rows or (key in self.used and not taken):
                return False
            taken |= rows
            return True
        return function in _MOVES and key not in self.used

    def names(self) -> dict[int, str]:
        """Names of weights by identity."""
        if len(self._names) != len(self.weights) + len(self._moved):
            self._names = {id(weight): name for name, weight in self.weights.items()}
            self._names.update({id(part): name for part, name in self._moved})
        return self._names


def parts_of(result: Any) -> Iterator[Moments]:
    """Moments that a function returned."""
    for part in result if isinstance(result, tuple | list) else (result,):
        if isinstance(part, Moments):
            yield part


def _leaves(args: tuple, kwargs: dict[str, Any]) -> Iterator[Any]:
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, list | tuple):
            yield from argument
        else:
            yield argument
