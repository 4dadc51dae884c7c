# SPDX-License-Identifier: Apache-2.0
"""The table of rules, which maps torch functions to functions of moments.

A rule is a function with the signature of a torch function; it takes :class:`~pyro_dvi.moments.GaussianMoments` in
place of some tensors and returns moments. :func:`moment_rule` registers it under every name by which users call the
torch function. Methods (``x.relu()``), operators and in-place forms (``x.relu_()``, ``F.relu(x, inplace=True)``, ``x +=
y``) are derived from these names.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from pyro_dvi.core.registry import registering
from pyro_dvi.moments.dispatch import Entry, Kind
from pyro_dvi.moments.tensor_like import ENTRIES

Rule = TypeVar("Rule", bound=Callable[..., Any])

RULES: dict[Callable, Callable] = {}
_KINDS: dict[Callable, Kind] = {}
_OWNERS = (torch.Tensor, torch, torch.nn.functional)
# Modules that contain the functions behind some public functions.
_INTERNAL = (torch._C._nn, torch._C.TensorBase, torch._C._VariableFunctions)
_OPERATORS = frozenset("add sub mul truediv div matmul pow".split())


def moment_rule(*functions: Callable, kind: Kind = Kind.OTHER) -> Callable[[Rule], Rule]:
    """Return a decorator that registers a rule for torch functions, or for others that dispatch in the same way.

    The rule has the signature of the function. List all spellings, such as ``F.relu, torch.relu``; the method
    ``Tensor.relu`` and in-place forms are derived from ``torch.relu``.

    Args:
        functions: the torch functions that the rule is for.
        kind: how the function treats elements. If the function is applied to a Gaussian, this determines whether a
            likelihood can integrate over that Gaussian.

    Raises:
        ValueError: if a function already has a rule.

    Example:
        >>> import torch
        >>> from pyro_dvi.moments import GaussianMoments
        >>> @moment_rule(torch.rad2deg)
        ... def rad2deg(x):
        ...     factor = 180 / torch.pi
        ...     return GaussianMoments(factor * x.loc, factor**2 * x.variance)
        >>> torch.rad2deg(GaussianMoments(torch.zeros(1), torch.ones(1))).variance
        tensor([3282.8064])
    """

    def register(rule: Rule) -> Rule:
        registering(RULES, functions)(rule)
        _KINDS.update(dict.fromkeys(functions, kind))
        for spelling in {s for function in functions for s in _spellings(function)}:
            entry = _entry(spelling)
            if entry is not None:
                ENTRIES[spelling] = entry
        return rule

    return register


def functions_of(owner: Any, names: str) -> list[Callable]:
    """Return functions of a module, or methods of a class, by their names."""
    return [getattr(owner, name) for name in names.split()]


def _spellings(function: Callable) -> Iterator[Callable]:
    """Yield the functions that a rule for this function may also serve."""
    yield function
    name = getattr(function, "__name__", "")
    operators = {"div": ("div", "truediv")}.get(name, (name,))
    dunders = [f"__{prefix}{operator}__" for prefix in ("", "r", "i") for operator in operators]
    for owner in (*_OWNERS, *_INTERNAL):
        for spelling in (name, f"{name}_", *dunders):
            found = getattr(owner, spelling, None)
            if found is not None:
                yield found


def _entry(func: Callable) -> Entry | None:
    name = getattr(func, "__name__", "")
    if func not in RULES and name.startswith("__") and name.endswith("__"):
        return _operator(name[2:-2])
    plain = name.removesuffix("_")
    for spelling in (func, *[getattr(owner, plain, None) for owner in _OWNERS]):
        if spelling in RULES:
            rule = RULES[spelling]
            in_place = spelling is not func and name.endswith("_")
            return Entry(rule, _KINDS[spelling], in_place, plain, not rule.__module__.startswith("pyro_dvi."))
    return None


def _operator(name: str) -> Entry | None:
    """Return the rule for an operator with a tensor on its left and moments on its right."""
    for prefix in ("", "r", "i"):
        core = name.removeprefix(prefix)
        if name.startswith(prefix) and core in _OPERATORS:
            function = getattr(torch, "div" if core == "truediv" else core)
            if function not in RULES:
                return None
            rule = _swapped(RULES[function]) if prefix == "r" else RULES[function]
            from_user = not rule.__module__.startswith("pyro_dvi.")
            return Entry(rule, _KINDS[function], False, name, from_user)  # Python rebinds x in x += y
    return None


def _swapped(rule: Callable) -> Callable:
    def swapped(first: Any, second: Any) -> Any:
        return rule(second, first)

    swapped.__module__ = rule.__module__
    return swapped
