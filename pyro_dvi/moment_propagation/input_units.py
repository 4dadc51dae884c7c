# SPDX-License-Identifier: Apache-2.0
"""The axes of a weight that index input units, inferred from a run of the model or chosen by the user."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pyro_dvi.core.weight_parts import Part, Places, WeightRecorder, name_of
from pyro_dvi.errors import ArgumentError

Axes = int | tuple[int, ...] | None
"""An axis, several axes, or None for a site that is not a weight."""


@dataclass(frozen=True)
class InputUnits:
    """The layout of a parameter with one number per input unit of a weight.

    Args:
        axes: nonnegative axes of the weight that index input units.
        groups: number of groups of a convolution. In its weight ``[out, in / groups, *kernel]``, the first axis is
            divided among the groups, and the second axis indexes different inputs for each group.
    """

    axes: tuple[int, ...]
    groups: int = 1

    def shape(self, weight: torch.Size) -> tuple[int, ...]:
        """Return the shape of the stored numbers: the weight's shape, with 1 for axes that do not index input units."""
        first = (self.groups,) if self.groups > 1 else ()
        kept = [size if axis in self.axes else 1 for axis, size in enumerate(weight)]
        return (*first, *kept[len(first) :])

    def along(self, numbers: Tensor, weight: torch.Size) -> Tensor:
        """Reshape stored numbers so that they broadcast to the weight."""
        return numbers if self.groups == 1 else numbers.repeat_interleave(weight[0] // self.groups, 0)


def chosen_units(input_axis: Mapping[str, Axes], name: str, dims: int) -> InputUnits | None | bool:
    """Return the user's choice for a site: a layout, None if the site is not a weight, or False if there is no choice.

    Args:
        input_axis: the argument of the guide.
        name: the site's name.
        dims: number of dimensions of the site's value.

    Raises:
        ArgumentError: the choice is not an axis of the site.
    """
    chosen = [axes for pattern, axes in input_axis.items() if fnmatchcase(name, pattern)]
    if not chosen or chosen[0] is None:
        return None if chosen else False
    axes = chosen[0]
    several = axes if isinstance(axes, tuple) else (axes,)
    valid = [a % dims for a in several if type(a) is int and -dims <= a < dims]
    if not several or len(set(valid)) < len(several):
        raise ArgumentError(
            f"input_axis of site {name!r} is {axes!r}, but its values have {dims} dimensions: pass axes, or None"
        )
    return InputUnits(tuple(sorted(valid)))


# Position of the weight among the arguments, and its axes that index inputs.
_LAYERS: dict[str, tuple[int, tuple[int, ...]]] = {
    "linear": (1, (-1,)),
    "bilinear": (2, (1, 2)),
    "embedding": (1, (0,)),
    "embedding_bag": (1, (0,)),
    **{f"conv{d}d": (1, (1,)) for d in (1, 2, 3)},
    **{f"conv_transpose{d}d": (1, (0,)) for d in (1, 2, 3)},
}
# In these modules, weights with two axes have one row per output.
_RECURRENT = frozenset(
    f"{name}{end}" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu") for end in ("", "_cell")
)
_NORMALISATIONS = frozenset("batch_norm instance_norm layer_norm group_norm rms_norm".split())
# Position of the first of two factors.
_MATRIX_PRODUCTS = {"matmul": 0, "mm": 0, "bmm": 0, "mv": 0, "addmm": 1, "addmv": 1, "baddbmm": 1}


class WeightProducts(WeightRecorder):
    """Records the products in which latent values are used: linear layers, convolutions, look-ups, matmul, einsum.

    A value is also recognised after its elements were reordered or reshaped, and after functions that keep its shape.

    Attributes:
        units: layouts inferred from the uses of each site, by site name; a use other than as a weight counts as None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.units: dict[str, set[InputUnits | None]] = {}

    def used(self, func: Callable, args: tuple, kwargs: dict[str, Any], output: Any, found: Places) -> None:
        function = name_of(func)
        factors = _factors(function, args, kwargs)
        for _, part in found:
            units = self.units.setdefault(part.key, set())
            if function in _NORMALISATIONS:
                units.add(None)
            elif (
                part.value.dim() == 2
                and function in _RECURRENT
                or part.value.dim() > 1
                and function == "weight_norm"
            ):
                units.add(InputUnits(tuple(_axes_along(part, 1))))
            for factor, dims, groups in factors or ():
                if factor is part.value:
                    axes = set().union(*(_axes_along(part, dim) for dim in dims))
                    units.add(InputUnits(tuple(sorted(axes)), groups))
            if factors is None and isinstance(output, Tensor) and output.shape == part.value.shape:
                self.parts.add_like(part, output)


class FollowedStart:
    """A Pyro initialisation strategy whose values are registered as weights in a record of products."""

    def __init__(self, init_loc_fn: Callable) -> None:
        self.init_loc_fn = init_loc_fn
        self.products: WeightProducts | None = None

    def __call__(self, site: Any) -> Any:
        value = self.init_loc_fn(site).detach()
        if self.products is not None:
            self.products.parts.add(site["name"], value)
        return value


def _factors(
    function: str, args: tuple, kwargs: Mapping[str, Any]
) -> list[tuple[Any, tuple[int, ...], int]] | None:
    """Return the factors of a product, each with its contracted dimensions and groups; None if it is not a product."""
    if function in _LAYERS:
        place, dims = _LAYERS[function]
        weight = kwargs.get("weight", args[place] if len(args) > place else None)
        groups = kwargs.get("groups", args[6] if len(args) > 6 else 1) if dims == (1,) else 1
        return [(weight, dims, groups)]
    if function in _MATRIX_PRODUCTS:
        a, b = [*args, *kwargs.values()][_MATRIX_PRODUCTS[function] :][:2]
        batch = (-i for i in range(3, min(a.dim(), b.dim()) + 1))
        shared = [d for d in batch if a.shape[d] == b.shape[d] > 1]
        return [(a, (-1, *shared), 1), (b, (-min(b.dim(), 2), *shared), 1)]
    if function == "einsum" and isinstance(args[0], str) and "..." not in args[0]:
        return list(_einsum_factors(args[0], tree_leaves(args[1:])))
    if function == "getitem" and isinstance(args[1], Tensor) and not args[1].is_floating_point():
        return [(args[0], (0,), 1)]
    return None


def _einsum_factors(equation: str, operands: list[Any]) -> Iterator[tuple[Any, tuple[int, ...], int]]:
    terms = equation.replace(" ", "").split("->")[0].split(",")
    for k, (term, operand) in enumerate(zip(terms, operands, strict=True)):
        others = set().union(*terms[:k], *terms[k + 1 :])
        yield operand, tuple(d for d, letter in enumerate(term) if letter in others), 1


def _axes_along(part: Part, dim: int) -> set[int]:
    """Return the axes of a weight along which a dimension of one of its parts runs."""
    if part.places is None:
        return {dim % len(part.shape)}
    places = part.places.movedim(dim, -1)
    indices = torch.unravel_index(places, part.shape)
    return {axis for axis, index in enumerate(indices) if bool((index != index[..., :1]).any())}
