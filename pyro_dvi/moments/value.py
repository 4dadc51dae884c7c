# SPDX-License-Identifier: Apache-2.0
r"""A tensor of independent Gaussians, its link to the Gaussians behind it, and the smallest variance of an input."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor

from pyro_dvi.errors import ArgumentError, UnsupportedError
from pyro_dvi.moments.tensor_like import TensorLike, call


@dataclass(frozen=True)
class Link:
    """The Gaussian that some moments were computed from, and the function: likelihoods integrate over that Gaussian.

    Attributes:
        inner: the Gaussian.
        function: the map from its values to values of the moments.
        name: its name if it is one torch function and nothing else ("exp", "softmax", ...); else None.
        elementwise: True if each element depends on one element of ``inner``, of the same shape.
        uniform: True if ``function`` is the same at each element, so that it still holds after elements moved.
        moved: True if each element depends on one element of ``inner``, but of another place or shape.
    """

    inner: GaussianMoments
    function: Callable[[Tensor], Tensor]
    name: str | None = None
    elementwise: bool = True
    uniform: bool = True
    moved: bool = False

    @property
    def separate(self) -> bool:
        """Return True if each element depends on one element of ``inner``, in any place."""
        return self.elementwise or self.moved


class Memory:
    """The number of changes in place, shared by moments that are views of each other."""

    __slots__ = ("version",)

    def __init__(self) -> None:
        self.version = 0


class GaussianMoments(TensorLike):
    r"""Mean and variance of a tensor of independent Gaussians, usable in place of a tensor.

    .. math:: x_i \sim \mathcal N(\mathrm{loc}_i, \mathrm{variance}_i)

    Torch functions of moments return moments; a function without a rule raises an error that shows how to write one.
    Operators, methods, and functions of :mod:`torch` and :mod:`torch.nn.functional` all work. Code that needs a number
    (``if x > 0``, ``x.item()``) is refused. Moments are not instances of :class:`torch.Tensor`, whose memory torch's
    compiled code would read; write ``hasattr(x, "shape")`` where a model asks.

    Status: each rule states its accuracy; correlations between elements are dropped, except of an object with
    itself (``x + x`` has four times the variance).

    Args:
        loc: means, floating point.
        variance: variances, broadcastable to ``loc``, not negative (not checked here, which would cost a pass).
        link: how these moments came from Gaussian ones, if they did.

    Attributes:
        shape, dtype, device: of ``loc``.
        link: as above.
        origin: the Gaussian that these, Gaussian too, are a multiple of and a shift, if they are.

    Raises:
        ArgumentError: shapes, dtypes or devices differ.

    Example:
        >>> x = GaussianMoments(torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.5]))
        >>> (2 * x + 1).sum()
        GaussianMoments(loc=8.0, variance=4.0)
    """

    __slots__ = ("_loc", "_memory", "_place", "_seen", "_variance", "__weakref__", "link", "origin")

    def __init__(self, loc: Tensor, variance: Tensor, link: Link | None = None) -> None:
        if loc.shape != variance.shape:
            variance = _fitted(loc, variance)
        if loc.dtype is not variance.dtype or loc.device != variance.device:
            raise ArgumentError(
                f"loc is {loc.dtype} on {loc.device}, variance {variance.dtype} on {variance.device}: they must agree"
            )
        self._loc, self._variance, self.link = loc, variance, link
        self._memory = Memory()
        self._seen = 0
        self._place: Any = None
        self.origin: Link | None = None

    @property
    def loc(self) -> Tensor:
        """Means."""
        if self._seen != self._memory.version:
            _refuse_stale()
        return self._loc

    @property
    def variance(self) -> Tensor:
        """Variances, in squared units of ``loc``."""
        if self._seen != self._memory.version:
            _refuse_stale()
        return self._variance

    def linked(self, link: Link | None) -> GaussianMoments:
        """Return these moments with another link."""
        other = GaussianMoments(self.loc, self.variance, link)
        other._memory, other._seen, other._place = self._memory, self._seen, self._place
        return other

    def detach(self) -> GaussianMoments:
        """Return the moments without their history, as a view that writes through."""
        return call(torch.detach, (self,), {})

    def snapshot(self) -> GaussianMoments:
        """Return the same moments as another object, which changes in place do not reach."""
        copy = GaussianMoments(self.loc, self.variance, self.link)
        copy.origin = self.origin
        return copy

    # In place -----------------------------------------------------------------------------------------------

    def alias(self, base: GaussianMoments, place: Any = None) -> GaussianMoments:
        """Mark as a view of ``base``.

        When either is changed in place, the other must not be used any more. A view made by an index is an exception: a
        change is written into its base as well.

        Args:
            base: the moments that this is a view of.
            place: the index that made it, if one did.
        """
        self._memory, self._seen = base._memory, base._memory.version
        self._place = None if place is None else (ref(base), place)
        return self

    def become(self, other: GaussianMoments) -> GaussianMoments:
        """Take the value of ``other``, as functions that work in place do."""
        base, place = (None, None) if self._place is None else (self._place[0](), self._place[1])
        if base is not None and base._seen == self._memory.version:
            loc, variance = base.loc.clone(), base.variance.clone()
            loc[place], variance[place] = other.loc, other.variance
            base.become(GaussianMoments(loc, variance))
        else:
            self._memory.version += 1
        self._loc, self._variance, self.link = other.loc, other.variance, other.link
        self.origin = other.origin
        self._seen = self._memory.version
        return self

    def __repr__(self) -> str:
        loc, variance = self.loc.detach(), self.variance.detach()
        if loc.dim() == 0:
            return f"GaussianMoments(loc={loc.item()}, variance={variance.item()})"
        return f"GaussianMoments(loc={loc}, variance={variance})"


def loc_of(x: Any) -> Any:
    """Return the mean of moments, and anything else as it is."""
    return x.loc if isinstance(x, GaussianMoments) else x


def variance_of(x: Any) -> Any:
    """Return the variance of moments, and None for anything else, which is certain."""
    return x.variance if isinstance(x, GaussianMoments) else None


def second_moment_of(x: Any) -> Any:
    r"""Return :math:`\mathrm E[x^2]`."""
    return torch.addcmul(x.variance, x.loc, x.loc) if isinstance(x, GaussianMoments) else x.square()


def _fitted(loc: Tensor, variance: Tensor) -> Tensor:
    try:
        return variance.expand_as(loc)
    except RuntimeError as error:
        raise ArgumentError(
            f"a variance of shape {tuple(variance.shape)} does not fit means of shape {tuple(loc.shape)}"
        ) from error


def _refuse_stale() -> NoReturn:
    raise UnsupportedError(
        "moments are used after a view of them (or their base) was changed in place: use the function that returns a "
        "new tensor, relu(x) instead of relu_(x), nn.ReLU(inplace=False)"
    )


class _Local(threading.local):
    """The floor that this thread asked for."""

    def __init__(self) -> None:  # an attribute of the instance: Dynamo of torch 2.8 guards no others
        self.floor: float | None = None


_LOCAL = _Local()


@contextmanager
def variance_floor(minimum: float) -> Iterator[None]:
    r"""Raise the variances of the inputs of nonlinearities to at least ``minimum``.

    The slopes of :math:`\mathrm E[f(x)]` in the variance grow as :math:`1/\sigma` where f has a kink. By default the
    floor is the square of the rounding error of the dtype, which changes no result.

    Raises:
        ArgumentError: a negative floor.
    """
    if minimum < 0:
        raise ArgumentError(f"a variance floor must not be negative, got {minimum}")
    before = _LOCAL.floor
    _LOCAL.floor = minimum
    try:
        yield
    finally:
        _LOCAL.floor = before


def floored(variance: Tensor) -> Tensor:
    """Return the variance, at least the floor."""
    tiny = tiny_variance(variance.dtype)
    floor = _LOCAL.floor
    return variance.clamp_min(tiny if floor is None else max(floor, tiny))


def raised(variance: Tensor) -> Tensor:
    """Return the variance, at least the floor if one was asked for: rules that see to zeros themselves start so."""
    floor = _LOCAL.floor
    return variance if floor is None else variance.clamp_min(floor)


def tiny_variance(dtype: torch.dtype) -> float:
    """Return the default floor."""
    return torch.finfo(dtype).eps ** 2
