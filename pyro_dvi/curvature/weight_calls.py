# SPDX-License-Identifier: Apache-2.0
"""Recorded calls of functions with uncertain weights, which can be repeated after the model has run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from pyro_dvi.core.weight_parts import Part
from pyro_dvi.curvature.per_example.example_rules import Arguments, Use
from pyro_dvi.curvature.products import LinearMap
from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.dispatch import observed_by
from pyro_dvi.moments.tensor_like import call
from pyro_dvi.moments.value import loc_of
from pyro_dvi.moments.weight_uses import parts_of


def hold_variances(func: Callable, args: tuple, kwargs: dict[str, Any], result: Any) -> list[GaussianMoments]:
    """Hold constant the variances of the moments that a function returned, and return these moments."""
    arguments = {id(a) for a in tree_leaves((args, kwargs))}
    parts = [part for part in parts_of(result) if id(part) not in arguments]
    for part in parts:
        part._variance = part.variance.detach()
    return parts


def _holding_variances(func: Callable, args: tuple, kwargs: dict[str, Any], result: Any) -> Any:
    """Observe a repeated call, and hold its variances constant."""
    hold_variances(func, args, kwargs, result)
    return result


@dataclass(frozen=True)
class Slot:
    """Placeholder for a weight in the arguments of a call, by the id of its moments."""

    key: int


@dataclass(frozen=True, eq=False)
class Call:
    """The record of a function call with weights among its arguments, and of one of the moments that it returned.

    Attributes:
        func: the function.
        args: its positional arguments, detached, with a :class:`Slot` in place of each weight.
        kwargs: its keyword arguments, detached, with a :class:`Slot` in place of each weight.
        weights: the weights by id, detached.
        place: index of the moments among those that the function returned.
        result: these moments, kept alive so that their id is not reused.
        output: the means of the result at the time of the call; later in-place operations may change it.
        alone: whether the result is a function of weights only; it is then treated as a weight.
    """

    func: Callable
    args: tuple
    kwargs: dict[str, Any]
    weights: Mapping[int, GaussianMoments]
    place: int
    result: GaussianMoments
    output: Tensor
    alone: bool

    @property
    def others(self) -> list[GaussianMoments]:
        """Return the uncertain arguments that are not weights, each once."""
        found = {id(a): a for a in tree_leaves((self.args, self.kwargs)) if isinstance(a, GaussianMoments)}
        return list(found.values())

    def again(self, of_weight: Callable[[int], Any], of_other: Callable[[GaussianMoments], Any]) -> Any:
        """Repeat the call with other weights and other uncertain arguments."""
        copies: dict[int, Any] = {}  # identical arguments stay identical

        def replaced(argument: Any) -> Any:
            if not isinstance(argument, Slot | GaussianMoments):
                return argument
            key = argument.key if isinstance(argument, Slot) else id(argument)
            if key not in copies:
                new = of_weight(key) if isinstance(argument, Slot) else of_other(argument)
                copies[key] = new.snapshot() if isinstance(new, GaussianMoments) else new
            return copies[key]

        result = call(self.func, *tree_map(replaced, (self.args, self.kwargs)))
        return result[self.place] if isinstance(result, tuple | list) else result

    def uses(self) -> dict[int, Use]:
        """Return the call as a use of each of its weights, with tensors, as the per-example rules expect."""

        def certain(argument: Any) -> Any:
            return self.weights[argument.key].loc if isinstance(argument, Slot) else loc_of(argument)

        named: list[tuple[int | str, Any]] = [*enumerate(self.args), *self.kwargs.items()]
        places = {place: a.key for place, a in named if isinstance(a, Slot)}
        if sorted(places.values()) != sorted(self.weights):  # a weight is in a list, or occurs twice
            return {}
        args, kwargs = tree_map(certain, (self.args, self.kwargs))
        arguments, found = Arguments(args, kwargs, tuple(places)), {}
        for place, key in places.items():
            part = Part(key, self.result, self.weights[key].shape)
            found[key] = Use(self.func, place, arguments, part, self.output.shape, self.output)
        return found

    @torch.no_grad()
    def interaction(self) -> Tensor | None:
        """Return the variance due to products of the noise in weights and in other arguments; None without such noise.

        This is the total variance of the result minus the variances due to each argument alone.
        """
        if not self.others:
            return None
        total = self.again(self.weights.__getitem__, lambda other: other).variance
        for single in (*self.weights.values(), *self.others):
            total = total - self._with_noise_of(single).variance
        return total.clamp_min(0)

    def _with_noise_of(self, single: GaussianMoments) -> GaussianMoments:
        def only(moments: GaussianMoments) -> Any:
            return moments if moments is single else loc_of(moments)

        return self.again(lambda key: only(self.weights[key]), only)

    def pulled_back(self, deltas: Tensor) -> dict[int, Tensor]:
        """Return gradients ``[m, *weight]`` of each weight.

        Args:
            deltas: m gradients of the whole output, ``[m, *output]``.
        """
        if not self._linearised.outputs.requires_grad:
            return {}
        return dict(zip(self.weights, self._linearised.transposed(deltas), strict=True))

    @cached_property
    def _linearised(self) -> LinearMap:
        leaves = {key: weight.loc.clone().requires_grad_() for key, weight in self.weights.items()}
        weights = {key: GaussianMoments(leaf, self.weights[key].variance) for key, leaf in leaves.items()}
        with torch.enable_grad(), observed_by(_holding_variances):
            result = self.again(weights.__getitem__, lambda other: other)
        return LinearMap(result.loc, list(leaves.values()))
