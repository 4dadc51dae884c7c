# SPDX-License-Identifier: Apache-2.0
"""Checks of options (objects, counts, positive numbers), and the signatures of models."""

import inspect
import math
import reprlib
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

from torch import nn

from pyro_dvi.errors import ArgumentError, UnsupportedError


def check_choice(name: str, value: object, kind: type | tuple[type, ...], examples: str) -> None:
    """Raise an error if a value is not an instance of a class.

    Args:
        name: name of the option.
        value: the given value.
        kind: the required class, or a tuple of classes.
        examples: objects to pass instead, named in the message.

    Raises:
        ArgumentError: if the value is not such an instance.
    """
    if isinstance(value, kind):
        return
    hint = (
        f" itself: write {value.__name__}(...)" if isinstance(value, type) and issubclass(value, kind) else ""
    )
    what = f"the class {value.__name__}{hint}" if isinstance(value, type) else reprlib.repr(value)
    raise ArgumentError(f"{name} must be an object such as {examples}, not {what}")


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Raise an error if a value is not an integer, or is too small.

    Raises:
        ArgumentError: if the value is not an integer of at least ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        what = "a positive whole number" if least == 1 else f"a whole number of at least {least}"
        raise ArgumentError(f"{name} must be {what}, not {reprlib.repr(value)}")


def is_number(value: Any, end: float = math.inf) -> bool:
    """Return True if a value is a number of at least zero and below ``end``."""
    return isinstance(value, Real) and not isinstance(value, bool) and 0 <= float(value) < end


def check_positive(name: str, value: Any) -> None:
    """Raise an error if a value is not a finite number above zero.

    Raises:
        ArgumentError: if the value is not such a number.
    """
    if not is_number(value) or value == 0:
        raise ArgumentError(f"{name} must be a positive number, not {reprlib.repr(value)}")


def check_kl_weight(name: str, value: Any) -> None:
    """Raise an error if a value is not a finite, nonnegative number.

    Raises:
        ArgumentError: if the value is not such a number.
    """
    if not is_number(value):
        raise ArgumentError(
            f"{name} must be a finite number >= 0, not {reprlib.repr(value)}; 1 corresponds to Bayes' rule"
        )


def with_missing(fn: Callable[..., Any], inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Append None to ``inputs`` for each further required argument of ``fn``, such as y of ``model(x, y)``."""
    parameters = positional(fn)
    required = [i for i, p in enumerate(parameters) if p.default is inspect.Parameter.empty]
    return inputs + (None,) * (max(required, default=-1) + 1 - len(inputs))


def parameter_names(fn: Callable[..., Any], count: int) -> list[str]:
    """Return the names of the first ``count`` positional arguments of ``fn``; arguments without a name are numbered."""
    names = [p.name for p in positional(fn)]
    return [names[i] if i < len(names) else f"input_{i}" for i in range(count)]


def _signature(fn: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        inner = inspect.unwrap(fn)  # below Pyro's handlers
        return list(
            inspect.signature(inner.forward if isinstance(inner, nn.Module) else fn).parameters.values()
        )
    except (TypeError, ValueError):  # builtins have no signature
        return []


def positional(fn: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters that can be passed by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p for p in _signature(fn) if p.kind in kinds]


def keyword_only(fn: Callable[..., Any]) -> list[str]:
    """Return the names of keyword-only parameters."""
    return [p.name for p in _signature(fn) if p.kind is inspect.Parameter.KEYWORD_ONLY]


def takes_any_number(fn: Callable[..., Any]) -> bool:
    """Return True if ``fn`` takes any number of positional arguments, or has no signature."""
    parameters = _signature(fn)
    return not parameters or any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters)


def by_own_names(fn: Callable[..., Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return keyword arguments under the parameter names of ``fn``; its ``own_names`` may translate other names."""
    own_names = getattr(inspect.unwrap(fn), "own_names", None)
    return kwargs if own_names is None else own_names(kwargs)


def by_position(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return positional and keyword arguments in the order of their positions.

    Raises:
        UnsupportedError: if one of the arguments belongs to a keyword-only parameter of ``fn``.

    Example:
        >>> by_position(lambda x, y=None: None, (), {"y": 2, "x": 1})
        (1, 2)
    """
    bound = inspect.Signature(_signature(fn)).bind(*args, **by_own_names(fn, kwargs)) if kwargs else None
    if bound is not None and bound.kwargs:
        raise UnsupportedError(
            f"predictions pass inputs by position, but the arguments {sorted(bound.kwargs)} of the model are "
            "keyword-only: wrap the model in a function that takes them by position"
        )
    return args if bound is None else bound.args


def misfit(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Return why ``fn`` does not accept these arguments; None if it does, or has no signature.

    Example:
        >>> misfit(lambda x, y=None: None, (1, 2, 3), {})
        'too many positional arguments; it takes (x, y)'
    """
    parameters = _signature(fn)
    try:
        inspect.Signature(parameters).bind(*args, **by_own_names(fn, kwargs))
    except TypeError as error:
        return f"{error}; it takes ({', '.join(p.name for p in parameters)})" if parameters else None
    return None
