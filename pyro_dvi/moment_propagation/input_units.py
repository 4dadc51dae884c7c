# SPDX-License-Identifier: Apache-2.0
"""Which axis of a weight counts its input units: what the layer says that owns it, or what the user says."""

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

from pyro_dvi.core.undisturbed import modules_met
from pyro_dvi.errors import ArgumentError

Axes = int | tuple[int, ...] | None
"""An axis, several, or None for a site that is no weight."""

InputAxis = Axes | Mapping[str, Axes] | Callable[[str], Axes]


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


def chosen_units(input_axis: InputAxis, name: str, dims: int, owned: bool) -> InputUnits | None | bool:
    """Return what the user chose for a site: a layout, None for no weight, or False for no choice.

    Args:
        input_axis: the option of the guide.
        name: the site's name.
        dims: number of dimensions of its value.
        owned: whether a torch layer owns the site, which then knows better than a single axis for all.

    Raises:
        ArgumentError: the choice is no axis of the site.
    """
    if isinstance(input_axis, Mapping):
        for pattern, axes in input_axis.items():
            if fnmatchcase(name, pattern):
                return _checked(axes, name, dims)
        return False
    if dims < 2:
        return False
    if callable(input_axis):
        return _checked(input_axis(name), name, dims)
    return False if input_axis is None or owned else _checked(input_axis, name, dims)


def check_input_axis(input_axis: Any) -> None:
    """Raise ArgumentError if the option of the guide has a form that it cannot have."""
    if isinstance(input_axis, Mapping):
        if not all(isinstance(name, str) for name in input_axis):
            raise ArgumentError(f"the keys of input_axis must be site names, got {list(input_axis)}")
    elif input_axis is not None and not callable(input_axis):
        _several("input_axis, if it is no mapping from site names and no callable of them,", input_axis)


def _several(what: str, axes: Any) -> tuple[int, ...]:
    several = axes if isinstance(axes, tuple) else (axes,)
    if not several or not all(isinstance(axis, int) and not isinstance(axis, bool) for axis in several):
        raise ArgumentError(f"{what} must be an axis, a tuple of axes, or None for no weight; got {axes!r}")
    return several


def _checked(axes: Any, name: str, dims: int) -> InputUnits | None:
    if axes is None:
        return None
    several = _several(f"input_axis of site {name!r}", axes)
    if not all(-dims <= axis < dims for axis in several) or len({a % dims for a in several}) < len(several):
        raise ArgumentError(
            f"input_axis of site {name!r} is {axes!r}, but its values have {dims} dimensions: choose different axes "
            f"from {-dims} to {dims - 1}"
        )
    return InputUnits(tuple(sorted(axis % dims for axis in several)))
