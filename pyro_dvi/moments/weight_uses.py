# SPDX-License-Identifier: Apache-2.0
"""Which functions use the latent weights, as seen while a model runs with moments.

A result may depend on weights by two ways: a network applied twice, tied layers. Moments drop the covariance of both.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pyro_dvi.errors import warn
from pyro_dvi.moments.dispatch import observed_by
from pyro_dvi.moments.value import GaussianMoments

# What gives the elements of a weight another place, each once: the result is the weight again.
_MOVES = frozenset(
    "t T mT transpose swapaxes swapdims permute movedim moveaxis view reshape flatten ravel unflatten squeeze "
    "unsqueeze chunk split split_with_sizes tensor_split unbind __iter__ clone contiguous detach".split()
)


class WeightTracker:
    """Recognise weights among the arguments of a function, by identity.

    Args:
        weights: latent weights by name; may be filled while the model runs.

    Attributes:
        used: identities of weights that a function has used.
    """

    def __init__(self, weights: Mapping[str, GaussianMoments]) -> None:
        self.weights = weights
        self.used: set[int] = set()
        self._names: dict[int, str] = {}
        self._moved: list[tuple[GaussianMoments, str]] = []  # kept, so that their identities stay taken
        self._parts: dict[int, list[int]] = {}  # identities of what was moved, by the weight's
        self._taken: dict[int, Tensor] = {}  # elements of a weight that indices have taken
        # Of each rule that is at work, the weights that functions it calls use.
        self._inside: list[set[int]] = []

    def entering(self) -> None:
        """Note that a rule is about to be called."""
        self._inside.append(set())

    def found(
        self, func: Callable, args: tuple, kwargs: dict[str, Any], result: Any
    ) -> list[tuple[int, str]]:
        """Return identities and names of the weights that a call uses.

        There are none if it only moves their elements, or if functions that its rule called used them: these were seen.
        """
        names, inside = self.names(), self._inside.pop()
        found = [(id(a), names[id(a)]) for a in tree_leaves((args, kwargs)) if id(a) in names]
        if self._inside:
            self._inside[-1].update(key for key, _ in found)
        found = [(key, name) for key, name in found if key not in inside]
        name = getattr(func, "__name__", "").strip("_")
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


@contextmanager
def warned_of_repeated_uses(weights: Mapping[str, GaussianMoments]) -> Iterator[None]:
    """Warn at the end of the context if uses of one weight met, naming the weights.

    Two uses that never meet in one function (a net that sees two data sets, each with its own likelihood) are fine, and
    all that happens within the rule of one function (the steps of :class:`torch.nn.LSTM`) is one use.

    Args:
        weights: latent weights by name; may be filled while the model runs.
    """
    uses = _Uses(weights)
    with observed_by(uses):
        yield
    if uses.repeated:
        warn(
            f"the result depends on {', '.join(map(repr, uses.repeated))} by two ways (a network applied twice, tied "
            "layers). GaussianMoments drop the covariance of the two: variances come out too wide in "
            "differences f(a) - f(b), too narrow in sums. compare_with_sampling says how much; where it matters, use "
            "a weight once ((a - b) @ w), predict with Moments(propagation=ReverseDelta()), or train with TaylorELBO "
            "and predict with Samples(n)."
        )


class _Uses(WeightTracker):
    """Observe which uses of weights each result depends on."""

    outermost = True

    def __init__(self, weights: Mapping[str, GaussianMoments]) -> None:
        super().__init__(weights)
        self.repeated: dict[str, None] = {}  # in the order in which they were found
        self._number = count()
        self._behind: dict[int, tuple[Tensor, dict[int, int]]] = {}  # by the tensor of means, kept alive

    def __call__(self, func: Callable, args: tuple, kwargs: dict[str, Any], result: Any) -> Any:
        uses: dict[int, int] = {}
        found = self.found(func, args, kwargs, result)
        number = next(self._number)
        before = [self._behind[id(a._loc)][1] for a in tree_leaves((args, kwargs)) if self._is_known(a)]
        here = {part: number for key, _ in found for part in (key, *self._parts.get(key, ()))}
        for origin in (*before, here):
            for key, use in origin.items():
                if uses.setdefault(key, use) != use:
                    self.repeated[self.names()[key]] = None
        self.used.update(key for key, _ in found)
        for part in parts_of(result):
            self._behind[id(part._loc)] = part._loc, uses
        return result

    def _is_known(self, argument: Any) -> bool:
        return isinstance(argument, GaussianMoments) and id(argument._loc) in self._behind
