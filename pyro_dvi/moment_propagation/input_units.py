# SPDX-License-Identifier: Apache-2.0
"""The axes of a weight that count input units: from products in a run of the model, its layer, or the user."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import torch
from pyro.nn import PyroModule
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves

from pyro_dvi.core.undisturbed import modules_met
from pyro_dvi.core.weight_parts import Part, Places, WeightRecorder, name_of
from pyro_dvi.errors import ArgumentError

Axes = int | tuple[int, ...] | None
"""An axis, several, or None for a site that is no weight."""


@dataclass(frozen=True)
class InputUnits:
    """The layout of one number per input unit of a weight.

    Args:
        axes: axes of the weight along which input units are counted, not negative.
        groups: number of groups of a convolution, whose weight ``[out, in / groups, *kernel]`` repeats the second
            axis for each; its first axis is divided among the groups.
    """

    axes: tuple[int, ...]
    groups: int = 1

    def shape(self, weight: torch.Size) -> tuple[int, ...]:
        """Return the shape in which the numbers are stored: that of the weight, 1 where they are shared."""
        first = (self.groups,) if self.groups > 1 else ()
        kept = [size if axis in self.axes else 1 for axis, size in enumerate(weight)]
        return (*first, *kept[len(first) :])

    def along(self, numbers: Tensor, weight: torch.Size) -> Tensor:
        """Return stored numbers in a shape that broadcasts to the weight."""
        return numbers if self.groups == 1 else numbers.repeat_interleave(weight[0] // self.groups, 0)


# Owners of weights ---------------------------------------------------------------------------------------------


@dataclass
class Layers:
    """Modules that a run called, and their parts, as the owners of its sample sites.

    Attributes:
        called: the modules by identity.
    """

    called: dict[int, nn.Module] = field(default_factory=dict)

    @cached_property
    def owners(self) -> dict[str, tuple[nn.Module, str]]:
        """By site name, the module that samples a site and the name of the attribute; asked for after the run."""
        found: dict[str, tuple[nn.Module, str]] = {}
        seen: set[int] = set()
        for root in self.called.values():
            for part in root.modules():
                if id(part) in seen or not isinstance(part, PyroModule) or not part._pyro_context.used:
                    continue
                seen.add(id(part))
                for attribute in part._pyro_samples:
                    found.setdefault(part._pyro_get_fullname(attribute), (part, attribute))
        return found


@contextmanager
def layers_called() -> Iterator[Layers]:
    """Note every module that is called inside the context, also by a model that is a plain function."""
    layers = Layers()

    def note(module: nn.Module) -> None:
        layers.called[id(module)] = module

    with modules_met(note):
        yield layers


_NORMALISATIONS: tuple[type, ...] = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def units_of_layer(layer: nn.Module | None, attribute: str) -> InputUnits | None:
    """Return the layout of a weight that no product of the model shows, or several; None where it has no input units.

    Args:
        layer: the module that owns the weight; None for a model without modules.
        attribute: its name there.
    """
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        return InputUnits((0,))  # a row belongs to one entry of a one-hot input
    if isinstance(layer, _NORMALISATIONS):
        return None
    if isinstance(layer, nn.MultiheadAttention) and attribute in ("bias_k", "bias_v"):
        return None
    return InputUnits((1,))


# The user's choice ---------------------------------------------------------------------------------------------


def chosen_units(input_axis: Mapping[str, Axes], name: str, dims: int) -> InputUnits | None | bool:
    """Return what the user chose for a site: a layout, None for no weight, or False for no choice.

    Args:
        input_axis: the option of the guide.
        name: the site's name.
        dims: number of dimensions of its value.

    Raises:
        ArgumentError: the choice is no axis of the site.
    """
    chosen = [axes for pattern, axes in input_axis.items() if fnmatchcase(name, pattern)]
    return _checked(chosen[0], name, dims) if chosen else False


def check_input_axis(input_axis: Any) -> None:
    """Raise ArgumentError if the option of the guide has a form that it cannot have."""
    if not isinstance(input_axis, Mapping) or not all(isinstance(name, str) for name in input_axis):
        raise ArgumentError(f"input_axis maps site names to axes, as {{'w': 0}}; got {input_axis!r}")


def _checked(axes: Any, name: str, dims: int) -> InputUnits | None:
    if axes is None:
        return None
    several = axes if isinstance(axes, tuple) else (axes,)
    if not several or not all(isinstance(axis, int) and not isinstance(axis, bool) for axis in several):
        raise ArgumentError(
            f"input_axis of site {name!r} must be an axis, a tuple of axes, or None for no weight; got {axes!r}"
        )
    if not all(-dims <= axis < dims for axis in several) or len({a % dims for a in several}) < len(several):
        raise ArgumentError(
            f"input_axis of site {name!r} is {axes!r}, but its values have {dims} dimensions: choose different axes "
            f"from {-dims} to {dims - 1}"
        )
    return InputUnits(tuple(sorted(axis % dims for axis in several)))


# Place of the weight among the arguments, and its axes that count inputs.
_LAYERS: dict[str, tuple[int, tuple[int, ...]]] = {
    "linear": (1, (-1,)),
    "bilinear": (2, (1, 2)),
    "embedding": (1, (0,)),
    "embedding_bag": (1, (0,)),
    **{f"conv{d}d": (1, (1,)) for d in (1, 2, 3)},
    **{f"conv_transpose{d}d": (1, (0,)) for d in (1, 2, 3)},
}
# Place of the first of two factors.
_MATRIX_PRODUCTS = {"matmul": 0, "mm": 0, "bmm": 0, "mv": 0, "addmm": 1, "addmv": 1, "baddbmm": 1}


class WeightProducts(WeightRecorder):
    """Record the products that latent values take part in: linear layers, convolutions, look-ups, matmul, einsum.

    A value is recognised in another order or shape of its elements, and after functions that keep its shape.

    Attributes:
        units: by site name, the layouts that its products ask for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.units: dict[str, set[InputUnits]] = {}

    def used(self, func: Callable, args: tuple, kwargs: dict[str, Any], output: Any, found: Places) -> None:
        factors = _factors(name_of(func), args, kwargs)
        for _, part in found:
            for factor, dims, groups in factors or ():
                if factor is part.value:
                    axes = set().union(*(_axes_along(part, dim) for dim in dims))
                    self.units.setdefault(part.key, set()).add(InputUnits(tuple(sorted(axes)), groups))
            if factors is None and isinstance(output, Tensor) and output.shape == part.value.shape:
                self.parts.add_like(part, output)


class FollowedStart:
    """An initialisation strategy of Pyro whose values are known as weights to a record of products."""

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
    """Factors of a product, each with its dimensions that the others share and its groups; None if it is none."""
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
    """Return the axes of a weight whose index changes along a dimension of one of its parts."""
    if part.places is None:
        return {dim % len(part.shape)}
    places = part.places.movedim(dim, -1)
    indices = torch.unravel_index(places, part.shape)
    return {axis for axis, index in enumerate(indices) if bool((index != index[..., :1]).any())}
