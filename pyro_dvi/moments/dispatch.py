# SPDX-License-Identifier: Apache-2.0
"""What happens when a torch function meets moments: its rule is called, and the result completed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments.link import Link
from pyro_dvi.moments.rules import Entry, Kind, find, name_of
from pyro_dvi.moments.value import GaussianMoments

__all__ = ["Composed", "Observer", "broadcast", "dispatch", "observed_by"]


class Observer(Protocol):
    """Sees every function of moments with its result, and returns what shall be the result.

    One with an attribute ``outermost`` that is true does not see functions that the rule of another one calls.
    """

    def __call__(self, func: Callable, args: tuple, kwargs: dict[str, Any], result: Any) -> Any:
        """Return the result to go on with."""


class _Local(threading.local):
    """What holds for the thread that asked for it."""

    def __init__(self) -> None:
        self.observers: tuple[Observer, ...] = ()


_LOCAL = _Local()


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Show every function of moments to ``observer`` inside the context."""
    with _observers((*_LOCAL.observers, observer)):
        yield


@contextmanager
def _observers(observers: tuple[Observer, ...]) -> Iterator[None]:
    before = _LOCAL.observers
    _LOCAL.observers = observers
    try:
        yield
    finally:
        _LOCAL.observers = before


def dispatch(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call the rule of ``func``.

    Raises:
        UnsupportedError: there is none, or what a user's rule returned are no moments.
    """
    entry = find(func)
    if entry is None:
        raise UnsupportedError(_no_rule(func))
    in_place = entry.in_place
    if kwargs:
        if kwargs.pop("out", None) is not None:
            raise UnsupportedError(f"{name_of(func)}(out=...) cannot write moments into a tensor: drop out=")
        in_place = bool(kwargs.pop("inplace", False)) or in_place
    target = args[0] if args else None
    if in_place and isinstance(target, GaussianMoments):
        before = target.snapshot()
        args = tuple(before if a is target else a for a in args)
    result = _observed(entry.rule, args, kwargs) if _LOCAL.observers else entry.rule(*args, **kwargs)
    if entry.from_user:
        _check(func, entry.rule, result)
    if entry.kind is not Kind.OTHER:
        result = _with_link(entry, func, args, kwargs, result)
    for observer in _LOCAL.observers:
        result = observer(func, args, kwargs, result)
    return _written(func, target, result) if in_place else result


def _observed(rule: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    inner = tuple(o for o in _LOCAL.observers if not getattr(o, "outermost", False))
    with _observers(inner):
        return rule(*args, **kwargs)


def _no_rule(func: Callable) -> str:
    name = name_of(func)
    return (
        f"{name} has no rule for means and variances. Write one with the signature of the function:\n\n"
        "    from pyro_dvi.moments import GaussianMoments, moment_rule\n\n"
        f"    @moment_rule({name})\n"
        f"    def {name.rsplit('.', 1)[-1].strip('_')}_moments(x, ...):\n"
        "        return GaussianMoments(mean_of_the_result, variance_of_the_result)\n\n"
        "(see 'Adding a moment rule' in the documentation), replace the function in the model by one that has a rule, "
        "or train with TaylorELBO, which needs none."
    )


def _check(func: Callable, rule: Callable, result: Any) -> None:
    where = f"the rule {getattr(rule, '__qualname__', rule)} for {name_of(func)}"
    for part in result if isinstance(result, tuple | list) else (result,):
        if not isinstance(part, GaussianMoments | Tensor):
            raise UnsupportedError(
                f"{where} returned {type(part).__name__}: return GaussianMoments, or a tensor if certain"
            )
        if isinstance(part, GaussianMoments) and bool((part.variance < 0).any()):
            worst = part.variance.min().item()
            raise UnsupportedError(
                f"{where} returned a negative variance ({worst:.3g}). Differences such as E[f²] - E[f]² lose their "
                "digits where the mean is much larger than the deviation: centre them around f(mean), or clamp."
            )


def _with_link(entry: Entry, func: Callable, args: tuple, kwargs: dict[str, Any], result: Any) -> Any:
    """Remember the Gaussian behind the one argument that is uncertain."""
    uncertain = [k for k, a in enumerate(args) if isinstance(a, GaussianMoments)]
    if len(uncertain) != 1 or any(isinstance(a, GaussianMoments) for a in kwargs.values()):
        return result
    position = uncertain[0]
    x = args[position]
    link = x.link
    before, after = args[:position], args[position + 1 :]
    call = _Call(func, before, after, kwargs, entry.in_place)
    if entry.kind is Kind.REARRANGEMENT:
        return result if link is None or result is x else _rearranged(entry.rule, call, x, result)
    if not isinstance(result, GaussianMoments):
        return result
    if entry.kind is Kind.CONVERSION:
        return result if link is None or result is x else _converted(entry.rule, call, link, result)
    if link is None:
        if entry.kind is Kind.AFFINE:
            return result
        inner = broadcast(x.snapshot(), result)  # a copy of x, which may be changed in place later
        return result.linked(Link(inner, call, entry.name, uniform=call.uniform))
    # A link of elements that moved is not broadcast: what it gives has the shape of x.
    inner = broadcast(link.inner, result) if link.elementwise else link.inner
    function = Composed(link.function, call)
    uniform = link.uniform and call.uniform
    return result.linked(Link(inner, function, None, link.elementwise, uniform, link.moved))


def broadcast(inner: GaussianMoments, result: GaussianMoments) -> GaussianMoments:
    """Return the Gaussian in the shape of a result, where the other operand is larger."""
    if inner.shape == result.shape:
        return inner
    return GaussianMoments(inner.loc.expand(result.shape), inner.variance.expand(result.shape))


def _rearranged(rule: Callable, call: _Call, x: GaussianMoments, result: Any) -> Any:
    """Move the elements of the Gaussian; where the function differs between elements, those that it returns."""
    link = x.link
    assert link is not None
    if not link.separate or isinstance(result, Tensor):
        return result
    if link.elementwise and link.uniform:
        inner = call.of(rule, link.inner)
        if isinstance(result, GaussianMoments):
            return result.linked(Link(inner, link.function, link.name))
        pairs = zip(result, inner, strict=True)
        return type(result)(r.linked(Link(i, link.function, link.name)) for r, i in pairs)

    def moved(place: int | None) -> Link:
        function = Composed(link.function, _Moved(call, x.dim(), place))
        return Link(link.inner, function, None, elementwise=False, uniform=False, moved=True)

    if isinstance(result, GaussianMoments):
        return result.linked(moved(None))
    return type(result)(r.linked(moved(k)) for k, r in enumerate(result))


def _converted(rule: Callable, call: _Call, link: Link, result: GaussianMoments) -> GaussianMoments:
    """Convert the Gaussian if the function is known by its name, else what the function returns."""
    if link.uniform and link.name is not None:
        return result.linked(replace(link, inner=call.of(rule, link.inner)))
    return result.linked(replace(link, function=Composed(link.function, call), name=None))


class _Call:
    """A torch function with all arguments but one."""

    def __init__(
        self, func: Callable, before: tuple, after: tuple, kwargs: dict[str, Any], in_place: bool
    ) -> None:
        self.func, self.before, self.after, self.kwargs, self.in_place = func, before, after, kwargs, in_place

    @property
    def uniform(self) -> bool:
        others = (*self.before, *self.after, *self.kwargs.values())
        return not any(isinstance(a, Tensor) and a.dim() > 0 for a in others)

    def of(self, function: Callable, value: Any) -> Any:
        """Call another function with the arguments."""
        return function(*self.before, value, *self.after, **self.kwargs)

    def __call__(self, value: Any) -> Any:
        value = value.clone() if self.in_place else value
        if isinstance(value, GaussianMoments):  # a method of Tensor takes tensors only
            return dispatch(self.func, (*self.before, value, *self.after), dict(self.kwargs))
        return self.of(self.func, value)


class _Moved:
    """A function that moves elements, of values with any number of dimensions on the left."""

    def __init__(self, call: _Call, rank: int, place: int | None) -> None:
        self.call, self.rank, self.place = call, rank, place

    def __call__(self, value: Any) -> Any:
        extra = value.dim() - self.rank
        if extra <= 0 or isinstance(value, GaussianMoments):
            return self._moved(value)
        results = torch.stack([self._moved(v) for v in value.reshape(-1, *value.shape[extra:])])
        return results.reshape(*value.shape[:extra], *results.shape[1:])

    def _moved(self, value: Any) -> Any:
        result = self.call(value)
        return result if self.place is None else result[self.place]


class Composed:
    """One function after another."""

    def __init__(self, first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]) -> None:
        self.first, self.second = first, second

    def __call__(self, value: Tensor) -> Tensor:
        """Call both."""
        return self.second(self.first(value))


class _NotWritable(UnsupportedError, TypeError):
    """A TypeError too: after one, Python computes tensor += moments as tensor = tensor + moments."""


def _written(func: Callable, target: Any, result: Any) -> Any:
    if isinstance(target, GaussianMoments) and isinstance(result, GaussianMoments):
        return target.become(result)
    raise _NotWritable(
        f"{name_of(func)} writes moments into a tensor, which has no variance: use the form that returns a new value, "
        "or start from moments"
    )
