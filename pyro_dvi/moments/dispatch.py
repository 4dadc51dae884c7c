# SPDX-License-Identifier: Apache-2.0
"""Dispatch of torch functions that are called with moments.

The rule is called first. Its result is then linked, passed to observers and, for in-place functions, written into the
argument.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor

from pyro_dvi.core.recorder import is_recording
from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments.tensor_like import call, name_of
from pyro_dvi.moments.value import GaussianMoments, Link


class Observer(Protocol):
    """Called with the result of every function of moments; returns the result to continue with.

    An observer whose attribute ``outermost`` is true is not called for functions inside the rule of another function. A
    method ``entering`` is called before each rule, so that the observer can tell which calls are nested.
    """

    def __call__(self, func: Callable, args: tuple, kwargs: dict[str, Any], result: Any) -> Any:
        """Return the result to continue with."""


class _Local(threading.local):
    """The observers of this thread."""

    observers: tuple[Observer, ...] = ()


_LOCAL = _Local()


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Within this context, call ``observer`` after every function of moments."""
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


class Kind(Enum):
    """How a function treats elements, which determines the :class:`~pyro_dvi.moments.value.Link` of its result."""

    ELEMENTWISE = "a function of each element"
    AFFINE = "scaling and shift by constants: Gaussians stay Gaussian"
    REARRANGEMENT = "elements move but keep their value"
    CONVERSION = "elements keep place and value; dtype, device or history may change"
    OTHER = "anything else"


@dataclass(frozen=True)
class Entry:
    """A rule for one spelling of its function.

    An entry is created when the rule is registered, because inspecting names at each call is slow and ``torch.compile``
    cannot trace it.
    """

    rule: Callable[..., Any]
    kind: Kind
    in_place: bool
    name: str  # of the function, without the underscore of in-place forms
    from_user: bool

    def __call__(self, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call the rule and complete its result.

        Raises:
            UnsupportedError: if a user's rule returned something other than moments.
        """
        in_place = self.in_place
        if kwargs:
            if kwargs.pop("out", None) is not None:
                raise UnsupportedError(
                    f"{name_of(func)}(out=...) cannot write moments into a tensor: drop the argument out="
                )
            in_place = bool(kwargs.pop("inplace", False)) or in_place
        target = args[0] if args else None
        if in_place and isinstance(target, GaussianMoments):
            before = target.snapshot()
            args = tuple(before if a is target else a for a in args)
        result = _observed(self.rule, args, kwargs) if _LOCAL.observers else self.rule(*args, **kwargs)
        if self.from_user:
            _check(func, self.rule, result)
        if self.kind is not Kind.OTHER:
            result = _with_link(self, func, args, kwargs, result)
        for observer in _LOCAL.observers:
            result = observer(func, args, kwargs, result)
        return _written(func, target, result) if in_place else result


def _observed(rule: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    for observer in _LOCAL.observers:
        if hasattr(observer, "entering"):
            observer.entering()
    inner = tuple(o for o in _LOCAL.observers if not getattr(o, "outermost", False))
    with _observers(inner):
        return rule(*args, **kwargs)


def _check(func: Callable, rule: Callable, result: Any) -> None:
    where = f"the rule {getattr(rule, '__qualname__', rule)} for {name_of(func)}"
    for part in result if isinstance(result, tuple | list) else (result,):
        if isinstance(part, GaussianMoments) and not is_recording() and bool((part.variance < 0).any()):
            worst = part.variance.min().item()
            raise UnsupportedError(
                f"{where} returned a negative variance, {worst:.3g}: compute it from d = f(x) - f(mean), or clamp it"
            )


def _with_link(entry: Entry, func: Callable, args: tuple, kwargs: dict[str, Any], result: Any) -> Any:
    """If exactly one argument is uncertain, link the result to the Gaussian behind it."""
    uncertain = [k for k, a in enumerate(args) if isinstance(a, GaussianMoments)]
    if len(uncertain) != 1 or any(isinstance(a, GaussianMoments) for a in kwargs.values()):
        return result
    k = uncertain[0]
    return _LINKS[entry.kind](_Call(func, entry, args[:k], args[k + 1 :], kwargs), args[k], result)


@dataclass(frozen=True)
class _Call:
    """A torch function with all but one argument fixed."""

    func: Callable
    entry: Entry
    before: tuple
    after: tuple
    kwargs: dict[str, Any]

    @property
    def uniform(self) -> bool:
        others = (*self.before, *self.after, *self.kwargs.values())
        return not any(isinstance(a, Tensor) and a.dim() > 0 for a in others)

    def by_rule(self, value: GaussianMoments) -> Any:
        return self.entry.rule(*self.before, value, *self.after, **self.kwargs)

    def __call__(self, value: Any) -> Any:
        value = value.clone() if self.entry.in_place else value
        args = (*self.before, value, *self.after)
        if isinstance(value, GaussianMoments):  # a method of Tensor takes tensors only
            return call(self.func, args, dict(self.kwargs))
        return self.func(*args, **self.kwargs)


def _elementwise(step: _Call, x: GaussianMoments, result: Any) -> Any:
    """Apply one more function to the Gaussian behind x, or to x itself if it is Gaussian."""
    if not isinstance(result, GaussianMoments):
        return result
    link = x.link
    if link is None:
        inner = broadcast(x.snapshot(), result)  # a copy of x, which may be changed in place later
        return result.linked(Link(inner, step, step.entry.name, uniform=step.uniform))
    # The link of moved elements is not broadcast: its function returns the shape of x.
    inner = broadcast(link.inner, result) if link.elementwise else link.inner
    uniform = link.uniform and step.uniform
    return result.linked(
        Link(inner, Composed(link.function, step), None, link.elementwise, uniform, link.moved)
    )


def _affine(step: _Call, x: GaussianMoments, result: Any) -> Any:
    """Record the origin of a Gaussian result, or apply one more function to the Gaussian behind x."""
    if x.link is not None:
        return _elementwise(step, x, result)
    if isinstance(result, GaussianMoments) and result.link is None and result is not x:
        result.origin = Link(x.snapshot(), step)
    return result


def _rearranged(step: _Call, x: GaussianMoments, result: Any) -> Any:
    """Move the elements of the Gaussian, or the function's values if the function differs between elements."""
    link = x.link
    if link is None or not link.separate or result is x or isinstance(result, Tensor):
        return result
    parts = [result] if isinstance(result, GaussianMoments) else result
    if link.elementwise and link.uniform:
        inner = step.by_rule(link.inner)
        inners = [inner] if isinstance(inner, GaussianMoments) else inner
        links = [Link(i, link.function, link.name) for i in inners]
    else:
        places = [None] if parts[0] is result else range(len(parts))
        functions = [Composed(link.function, _Moved(step, x.dim(), k)) for k in places]
        links = [Link(link.inner, f, elementwise=False, uniform=False, moved=True) for f in functions]
    linked = [part.linked(link) for part, link in zip(parts, links, strict=True)]
    return linked[0] if parts[0] is result else type(result)(linked)


def _converted(step: _Call, x: GaussianMoments, result: Any) -> Any:
    """Convert the Gaussian if the link is a single named function; otherwise convert the values of this function."""
    link = x.link
    if link is None or result is x or not isinstance(result, GaussianMoments):
        return result
    if link.uniform and link.name is not None:
        return result.linked(replace(link, inner=step.by_rule(link.inner)))
    return result.linked(replace(link, function=Composed(link.function, step), name=None))


_LINKS = {
    Kind.ELEMENTWISE: _elementwise,
    Kind.AFFINE: _affine,
    Kind.REARRANGEMENT: _rearranged,
    Kind.CONVERSION: _converted,
}


def broadcast(inner: GaussianMoments, result: GaussianMoments) -> GaussianMoments:
    """Broadcast the Gaussian to the shape of a result, which may be larger because of another operand."""
    if inner.shape == result.shape:
        return inner
    return GaussianMoments(inner.loc.expand(result.shape), inner.variance.expand(result.shape))


class _Moved:
    """A function that moves elements; its argument may have additional dimensions on the left."""

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
    """Two functions, applied one after the other."""

    def __init__(self, first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]) -> None:
        self.first, self.second = first, second

    def __call__(self, value: Tensor) -> Tensor:
        """Apply the first function, then the second."""
        return self.second(self.first(value))


class _NotWritable(UnsupportedError, TypeError):
    """An error that is also a TypeError, so that Python computes tensor += moments as tensor = tensor + moments."""


def _written(func: Callable, target: Any, result: Any) -> Any:
    if isinstance(target, GaussianMoments) and isinstance(result, GaussianMoments):
        return target.become(result)
    raise _NotWritable(
        f"{name_of(func)} writes moments into a tensor, which has no variance: use the form that returns a new value"
    )
