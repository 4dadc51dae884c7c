# SPDX-License-Identifier: Apache-2.0
r"""Moments of independent Gaussians, links to the Gaussians that they are functions of, and a floor of variances."""

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
    """The Gaussian from which moments were computed, and the function that was applied to it.

    Likelihoods integrate over this Gaussian.

    Attributes:
        inner: the Gaussian.
        function: the map from values of the Gaussian to values of the variable whose moments were computed.
        name: the name of the function if it is a single torch function ("exp", "softmax", ...); else None.
        elementwise: True if each element depends on one element of ``inner``, which has the same shape.
        uniform: True if ``function`` is the same for each element, so that elements may be moved.
        moved: True if each element depends on one element of ``inner``, but in another place or shape.
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
    """The number of in-place changes, shared by moments that are views of each other."""

    __slots__ = ("version",)

    def __init__(self) -> None:
        self.version = 0


class GaussianMoments(TensorLike):
    r"""Mean and variance of a tensor of independent Gaussians, usable in place of a tensor.

    .. math:: x_i \sim \mathcal N(\mathrm{loc}_i, \mathrm{variance}_i)

    Torch functions of moments return moments; a function without a rule raises an error that shows how to write one.
    Operators, methods, and functions of :mod:`torch` and :mod:`torch.nn.functional` all work. Code that needs a number
    (``if x > 0``, ``x.item()``) raises an error. Moments are not instances of :class:`torch.Tensor`, because torch's
    compiled code would read their memory; a model that checks the type can use ``hasattr(x, "shape")`` instead.

    Status: each rule states its accuracy; correlations between elements are dropped, except between an object and
    itself (``x + x`` has four times the variance of x).

    Args:
        loc: means, floating point.
        variance: nonnegative variances, broadcastable to ``loc`` (the sign is not checked, to save a pass over memory).
        link: how these moments were computed from a Gaussian, if they were.

    Attributes:
        shape: shape of ``loc``; ``dtype`` and ``device`` are those of ``loc``, too.
        link: the argument ``link``.
        origin: a link to the Gaussian of which these moments are a scaled and shifted copy, if there is one.

    Raises:
        ArgumentError: if shapes, dtypes or devices differ.

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
                f"loc is {loc.dtype} on {loc.device}, variance {variance.dtype} on {variance.device}: they must match"
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
        """Return a view without autograd history; in-place changes of the view also change these moments."""
        return call(torch.detach, (self,), {})

    def snapshot(self) -> GaussianMoments:
        """Return a copy that in-place changes do not affect."""
        copy = GaussianMoments(self.loc, self.variance, self.link)
        copy.origin = self.origin
        return copy

    # In place -----------------------------------------------------------------------------------------------

    def alias(self, base: GaussianMoments, place: Any = None) -> GaussianMoments:
        """Mark these moments as a view of ``base``.

        After either is changed in place, the other must not be used. Views made by indexing are an exception: their
        changes are also written into the base.

        Args:
            base: the moments of which this is a view.
            place: the index that made the view, if any.
        """
        self._memory, self._seen = base._memory, base._memory.version
        self._place = None if place is None else (ref(base), place)
        return self

    def become(self, other: GaussianMoments) -> GaussianMoments:
        """Take the value of ``other``, as in-place functions do."""
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
    """Return the mean of moments; return anything else unchanged."""
    return x.loc if isinstance(x, GaussianMoments) else x


def variance_of(x: Any) -> Any:
    """Return the variance of moments; return None for anything else, because it is deterministic."""
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
        "moments are used after they were changed in place through a view: use relu(x) in place of relu_(x), and so on"
    )


class _Local(threading.local):
    """The floor set in this thread."""

    def __init__(self) -> None:  # an instance attribute, because Dynamo in torch 2.8 guards no other kind
        self.floor: float | None = None


_LOCAL = _Local()


@contextmanager
def variance_floor(minimum: float) -> Iterator[None]:
    r"""Raise the input variances of nonlinearities to at least ``minimum``.

    The derivative of :math:`\mathrm E[f(x)]` with respect to the variance grows as :math:`1/\sigma` at a kink of f. By
    default, the floor is the square of the rounding error of the dtype, which changes no result.

    Raises:
        ArgumentError: if the floor is negative.
    """
    before = _LOCAL.floor
    _LOCAL.floor = minimum
    try:
        yield
    finally:
        _LOCAL.floor = before


def floored(variance: Tensor) -> Tensor:
    """Return the variance, raised to the floor where it is smaller."""
    tiny = tiny_variance(variance.dtype)
    floor = _LOCAL.floor
    return variance.clamp_min(tiny if floor is None else max(floor, tiny))


def raised(variance: Tensor) -> Tensor:
    """Return the variance, raised to the floor if one was set; for rules that handle zero variance themselves."""
    floor = _LOCAL.floor
    return variance if floor is None else variance.clamp_min(floor)


def tiny_variance(dtype: torch.dtype) -> float:
    """Return the default floor."""
    return torch.finfo(dtype).eps ** 2
