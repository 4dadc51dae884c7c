# SPDX-License-Identifier: Apache-2.0
"""What the signature of a model says about its arguments."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from pyro_dvi.errors import UnsupportedError

__all__ = [
    "by_position",
    "keyword_only",
    "misfit",
    "parameter_names",
    "positional",
    "takes_any_number",
    "with_missing",
]


def with_missing(fn: Callable[..., Any], inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return ``inputs`` with None for every further argument that ``fn`` insists on, as in ``model(x, y)``."""
    parameters = positional(fn)
    required = [i for i, p in enumerate(parameters) if p.default is inspect.Parameter.empty]
    return inputs + (None,) * (max(required, default=-1) + 1 - len(inputs))


def parameter_names(fn: Callable[..., Any], count: int) -> list[str]:
    """Return the names of the first ``count`` positional arguments of ``fn``, numbered where it has none."""
    names = [p.name for p in positional(fn)]
    return [names[i] if i < len(names) else f"input_{i}" for i in range(count)]


def _signature(fn: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        inner = inspect.unwrap(fn)  # below Pyro's handlers
        return list(
            inspect.signature(inner.forward if isinstance(inner, nn.Module) else fn).parameters.values()
        )
    except (TypeError, ValueError):  # builtins and the like do not tell
        return []


def positional(fn: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters that can be given by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p for p in _signature(fn) if p.kind in kinds]


def keyword_only(fn: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters that can be given by name only."""
    return [p.name for p in _signature(fn) if p.kind is inspect.Parameter.KEYWORD_ONLY]


def takes_any_number(fn: Callable[..., Any]) -> bool:
    """Whether ``fn`` takes any number of arguments by position, or does not tell."""
    parameters = _signature(fn)
    return not parameters or any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)


def by_position(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return arguments, of which some are named, in the order of their positions.

    Raises:
        UnsupportedError: ``fn`` takes some by name only.

    Example:
        >>> by_position(lambda x, y=None: None, (), {"y": 2, "x": 1})
        (1, 2)
    """
    bound = inspect.Signature(_signature(fn)).bind(*args, **kwargs) if kwargs else None
    if bound is not None and bound.kwargs:
        raise UnsupportedError(
            f"predictions pass inputs to the model by position, but it takes {sorted(bound.kwargs)} by name only: wrap "
            "it in a function that takes them by position"
        )
    return args if bound is None else bound.args


def misfit(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Say why ``fn`` does not take these arguments; None where it does, or does not tell.

    Example:
        >>> misfit(lambda x, y=None: None, (1, 2, 3), {})
        'too many positional arguments; it takes (x, y)'
    """
    parameters = _signature(fn)
    try:
        inspect.Signature(parameters).bind(*args, **kwargs)
    except TypeError as error:
        return f"{error}; it takes ({', '.join(p.name for p in parameters)})" if parameters else None
    return None
