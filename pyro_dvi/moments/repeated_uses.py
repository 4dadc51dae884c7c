# SPDX-License-Identifier: Apache-2.0
"""Weights that a result depends on by two ways: a network applied twice, tied layers."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any

from torch import Tensor

from pyro_dvi.errors import DviWarning
from pyro_dvi.moments.dispatch import observed_by
from pyro_dvi.moments.value import GaussianMoments
from pyro_dvi.moments.weight_uses import WeightUses, leaves_of, parts_of

__all__ = ["warned_of_repeated_uses"]


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
        warnings.warn(
            f"the result depends on {', '.join(map(repr, uses.repeated))} by two ways (a network applied twice, tied "
            "layers). GaussianMoments drop the covariance of the two: variances come out too wide in "
            "differences f(a) - f(b), too narrow in sums. compare_with_sampling says how much; where it matters, use "
            "a weight once ((a - b) @ w), or train with TaylorELBO and predict with Samples(n).",
            DviWarning,
            stacklevel=3,
        )


class _Uses(WeightUses):
    """Observe which uses of weights each result depends on."""

    outermost = True
    composite = frozenset[str]()

    def __init__(self, weights: Mapping[str, GaussianMoments]) -> None:
        super().__init__(weights)
        self.repeated: dict[str, None] = {}  # in the order in which they were found
        self._number = count()
        self._behind: dict[int, tuple[Tensor, dict[int, int]]] = {}  # by the tensor of means, kept alive

    def __call__(self, func: Callable, args: tuple, kwargs: dict[str, Any], result: Any) -> Any:
        uses: dict[int, int] = {}
        found = self.found(func, args, kwargs, result)
        number = next(self._number)
        before = [self._behind[id(a._loc)][1] for a in leaves_of(args, kwargs) if self._is_known(a)]
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
