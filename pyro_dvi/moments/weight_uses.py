# SPDX-License-Identifier: Apache-2.0
"""While a model runs with moments, find weights that affect a result along two paths, and warn about them.

A result may depend on weights along two paths, for instance in tied layers or if a network is applied twice. Moments
drop the covariance between the paths.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations, count
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from pyro_dvi.core.weight_parts import Part, WeightParts
from pyro_dvi.errors import warn
from pyro_dvi.moments.dispatch import observed_by
from pyro_dvi.moments.value import GaussianMoments


def parts_of(result: Any) -> Iterator[GaussianMoments]:
    """Yield the moments that a function returned."""
    for part in result if isinstance(result, tuple | list) else (result,):
        if isinstance(part, GaussianMoments):
            yield part


@contextmanager
def warned_of_repeated_uses(weights: Mapping[str, GaussianMoments]) -> Iterator[None]:
    """At the end of the context, warn if two uses of a weight were combined; the message names the weights.

    Two uses that are never combined in one function (a network applied to two data sets, each with its own likelihood)
    are fine. Everything within the rule of one function (such as the steps of :class:`torch.nn.LSTM`) counts as one
    use.

    Args:
        weights: latent weights by name; this mapping may be filled while the model runs.
    """
    uses = _Uses(weights)
    with observed_by(uses):
        yield
    if uses.repeated:
        warn(
            f"the result depends on {', '.join(map(repr, uses.repeated))} along two paths (a network applied twice, "
            "tied layers). Moments drop the covariance between the paths, so variances are too large for differences "
            "f(a) - f(b) and too small for sums (see compare_with_sampling). Use each weight once, as in "
            "(a - b) @ w, predict with Moments(propagation=ReverseDelta()), or train with TaylorELBO."
        )


class _Uses:
    """Observe which uses of weights each result depends on."""

    outermost = True

    def __init__(self, weights: Mapping[str, GaussianMoments]) -> None:
        self.weights, self.parts = weights, WeightParts()
        self.repeated: dict[str, None] = {}  # in the order found
        self._number = count()
        # By the identity of the tensor of means: this tensor, to keep it alive, and the parts of each weight, by call
        # number and identity.
        self._behind: dict[int, tuple[Tensor, dict[str, dict[tuple[int, int], Part]]]] = {}

    def __call__(self, func: Callable, args: tuple, kwargs: dict[str, Any], result: Any) -> Any:
        for name, weight in self.weights.items():
            self.parts.add(name, weight)
        found = self.parts.among(args, kwargs)
        if len(found) == 1 and self.parts.follow(func, args, kwargs, result, found[0][1]):
            return result
        number = next(self._number)
        uses: dict[str, dict[tuple[int, int], Part]] = {}
        for argument in tree_leaves((args, kwargs)):
            if isinstance(argument, GaussianMoments) and id(argument._loc) in self._behind:
                for name, parts in self._behind[id(argument._loc)][1].items():
                    uses.setdefault(name, {}).update(parts)
        for _, part in found:
            uses.setdefault(part.key, {})[number, id(part)] = part
        for name, parts in uses.items():
            if len(parts) > 1 and name not in self.repeated and _overlapping(parts):
                self.repeated[name] = None
        for moments in parts_of(result):
            self._behind[id(moments._loc)] = moments._loc, uses
        return result


def _overlapping(parts: dict[tuple[int, int], Part]) -> bool:
    """Return True if two calls used the same element of a weight."""
    return any(i != j and a.overlaps(b) for ((i, _), a), ((j, _), b) in combinations(parts.items(), 2))
