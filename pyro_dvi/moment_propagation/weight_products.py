# SPDX-License-Identifier: Apache-2.0
"""Which axes of a weight meet its input, as the products in a run of the model show."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from pyro_dvi.moment_propagation.input_units import InputUnits

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

_watching: list["WeightProducts"] = []


@dataclass(frozen=True)
class FollowedStart:
    """An initialisation strategy of Pyro whose values are followed through the run by those who watch it."""

    init_loc_fn: Callable

    def __call__(self, site: Any) -> Any:
        value = self.init_loc_fn(site)
        if 0 in value.stride():  # of an expanded prior; steps in memory tell dimensions apart
            value = value.contiguous()
        for products in _watching:
            products.follow(site["name"], value, [{axis} for axis in range(value.dim())])
        return value


class WeightProducts(TorchFunctionMode):
    """Watch the products that latent values take part in: linear layers, convolutions, look-ups, matmul, einsum.

    A value is recognised in another order or shape of its elements, and after functions that keep its shape.

    Attributes:
        units: by site name, the layouts that its products ask for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.units: dict[str, set[InputUnits]] = {}
        # By identity: the site, a value that was made of it, and the site's axes along each of its dimensions.
        self._known: dict[int, tuple[str, Tensor, list[set[int]]]] = {}

    def follow(self, name: str, value: Tensor, axes: list[set[int]]) -> None:
        """Recognise a value among the arguments of functions to come.

        Args:
            name: the site that it was made of.
            value: the value.
            axes: for each of its dimensions, the axes of the site that lie along it.
        """
        self._known[id(value)] = name, value, axes

    def __enter__(self) -> "WeightProducts":
        _watching.append(self)
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        _watching.remove(self)

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        met = [self._known[id(a)] for a in tree_leaves((args, kwargs)) if id(a) in self._known]
        if met:
            factors = _factors(getattr(func, "__name__", "").strip("_"), args, kwargs)
            for factor, dims, groups in factors or ():
                if id(factor) in self._known:
                    name, _, axes = self._known[id(factor)]
                    found = InputUnits(tuple(sorted(set().union(*(axes[d] for d in dims)))), groups)
                    self.units.setdefault(name, set()).add(found)
            for part in tree_leaves(result) if factors is None else ():
                if isinstance(part, Tensor) and id(part) not in self._known:
                    self._follow_part(part, met)
        return result

    def _follow_part(self, part: Tensor, met: list[tuple[str, Tensor, list[set[int]]]]) -> None:
        for name, whole, axes in met:
            if _memory(part) is _memory(whole):
                self.follow(name, part, [_along(part, d, whole, axes) for d in range(part.dim())])
            elif part.shape == whole.shape:
                self.follow(name, part, axes)


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


def _memory(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base


def _along(part: Tensor, dim: int, whole: Tensor, axes: list[set[int]]) -> set[int]:
    """Axes of the site along a dimension of a view: those whose steps in memory it takes."""
    step = part.stride(dim)
    found = set()
    for other, own in enumerate(axes):
        first = whole.stride(other)
        if max(step, first) < min(step * part.shape[dim], first * whole.shape[other]):
            found |= own
    return found
