# SPDX-License-Identifier: Apache-2.0
"""A tensor of independent Gaussians that passes through torch functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor

from pyro_dvi.errors import ArgumentError, UnsupportedError
from pyro_dvi.moments.link import Link
from pyro_dvi.moments.memory import Memory
from pyro_dvi.moments.square import squared

__all__ = ["GaussianMoments", "MultiplicativeMoments", "loc_of", "second_moment_of", "variance_of"]


# Attributes and methods of a tensor that say nothing about its values.
_DESCRIPTIVE = frozenset(
    "shape dtype device ndim layout is_cuda is_cpu is_mps is_sparse is_quantized is_nested requires_grad itemsize "
    "size dim numel nelement ndimension stride is_contiguous is_floating_point is_complex is_signed element_size "
    "get_device".split()
)


def _operator(function: Callable) -> Callable[..., Any]:
    def operator(self: GaussianMoments, *other: Any) -> Any:
        return _dispatch(function, (self, *other), {})

    return operator


def _reflected(function: Callable) -> Callable[..., Any]:
    def operator(self: GaussianMoments, other: Any) -> Any:
        return _dispatch(function, (other, self), {})

    return operator


class GaussianMoments:
    r"""Mean and variance of a tensor of independent Gaussians, usable in place of a tensor.

    .. math:: x_i \sim \mathcal N(\mathrm{loc}_i, \mathrm{variance}_i)

    Torch functions of moments return moments, by the rules of this chapter; a function without a rule raises an error
    that shows how to write one. Operators, methods, and functions of :mod:`torch` and :mod:`torch.nn.functional` all
    work. What needs a number (``if x > 0``, ``x.item()``) is refused. They are no instances of :class:`torch.Tensor`,
    which torch's compiled code would take at its word; write ``hasattr(x, "shape")`` where a model asks.

    Status: each rule says how exact it is; correlations between elements are dropped throughout, but for an object
    with itself (``x + x`` has four times the variance).

    Args:
        loc: means, floating point.
        variance: variances, broadcastable to ``loc``, not negative (not checked here, which would cost a pass).
        link: how these moments came from Gaussian ones, if they did.

    Attributes:
        shape, dtype, device: those of ``loc``.

    Raises:
        ArgumentError: shapes, dtypes or devices differ.

    Example:
        >>> x = GaussianMoments(torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.5]))
        >>> (2 * x + 1).sum()
        GaussianMoments(loc=8.0, variance=4.0)
    """

    __slots__ = ("_link", "_loc", "_memory", "_place", "_seen", "_variance", "__weakref__")

    def __init__(self, loc: Tensor, variance: Tensor, link: Link | None = None) -> None:
        if loc.shape != variance.shape:
            variance = _fitted(loc, variance)
        if loc.dtype is not variance.dtype or loc.device != variance.device:
            raise ArgumentError(
                f"loc is {loc.dtype} on {loc.device}, variance {variance.dtype} on {variance.device}: they must agree"
            )
        self._loc, self._variance, self._link = loc, variance, link
        self._memory = Memory()
        self._seen = 0
        self._place: Any = None

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

    @property
    def link(self) -> Link | None:
        """How these moments came from Gaussian ones, if they did."""
        return self._link

    def linked(self, link: Link | None) -> GaussianMoments:
        """Return these moments with another link."""
        other = GaussianMoments(self.loc, self.variance, link)
        other._memory, other._seen, other._place = self._memory, self._seen, self._place
        return other

    def detach(self) -> GaussianMoments:
        """Return the moments without their history. What is written into them is written into these as well."""
        return _dispatch(torch.detach, (self,), {})

    def snapshot(self) -> GaussianMoments:
        """Return the same moments as another object, which changes in place do not reach."""
        return GaussianMoments(self.loc, self.variance, self.link)

    # In place -----------------------------------------------------------------------------------------------

    def alias(self, base: GaussianMoments, place: Any = None) -> GaussianMoments:
        """Mark as a view of ``base``.

        When either is changed in place, the other must not be used any more, but for a view made by an index: what is
        written into it is written into the base as well.

        Args:
            base: what it is a view of.
            place: the index that made it, if one did.
        """
        self._memory, self._seen = base._memory, base._memory.version
        self._place = None if place is None else (ref(base), place)
        return self

    def divided_into(self, parts: Sequence[GaussianMoments]) -> None:
        """Mark moments as parts that do not overlap.

        When one is changed in place, the others can be used further, these moments cannot.
        """
        for part, memory in zip(parts, self._memory.divided(len(parts)), strict=True):
            part._memory, part._seen, part._place = memory, memory.version, None

    def become(self, other: GaussianMoments) -> GaussianMoments:
        """Take the value of ``other``, as functions that work in place do."""
        base, place = (None, None) if self._place is None else (self._place[0](), self._place[1])
        if base is not None and base._seen == self._memory.version:
            loc, variance = base.loc.clone(), base.variance.clone()
            loc[place], variance[place] = other.loc, other.variance
            base.become(GaussianMoments(loc, variance))
        else:
            self._memory.changed()
        self._loc, self._variance, self._link = other.loc, other.variance, other.link
        self._seen = self._memory.version
        return self

    # Behaving as a tensor -----------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name in _DESCRIPTIVE:
            return getattr(self.loc, name)
        method = None if name.startswith("__") else getattr(torch.Tensor, name, None)
        if not callable(method):
            raise AttributeError(f"GaussianMoments have no attribute {name!r}")
        return partial(self._call, method)

    def _call(self, method: Callable, *args: Any, **kwargs: Any) -> Any:
        return _dispatch(method, (self, *args), kwargs)

    @property
    def T(self) -> GaussianMoments:
        """Transpose of a matrix."""
        return _dispatch(torch.t, (self,), {})

    @property
    def mT(self) -> GaussianMoments:
        """Transpose of the last two dimensions."""
        return _dispatch(torch.transpose, (self, -2, -1), {})

    @property
    def data(self) -> GaussianMoments:
        """The moments without their history."""
        return self.detach()

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(
                "an uncertain number has no length. If torch.tensor or torch.as_tensor asked for it: they hold certain "
                "numbers, take x.loc"
            )
        return len(self.loc)

    def __iter__(self) -> Iterator[GaussianMoments]:
        return iter(_dispatch(torch.unbind, (self, 0), {}))

    def __getitem__(self, index: Any) -> GaussianMoments:
        return _dispatch(torch.Tensor.__getitem__, (self, index), {})

    def __setitem__(self, index: Any, value: Any) -> None:
        _dispatch(torch.Tensor.__setitem__, (self, index, value), {})

    # Operators: forwards, with the other on the left, and in place.
    __add__, __radd__, __iadd__ = _operator(torch.add), _reflected(torch.add), _operator(torch.Tensor.add_)
    __sub__, __rsub__, __isub__ = _operator(torch.sub), _reflected(torch.sub), _operator(torch.Tensor.sub_)
    __mul__, __rmul__, __imul__ = _operator(torch.mul), _reflected(torch.mul), _operator(torch.Tensor.mul_)
    __truediv__, __rtruediv__ = _operator(torch.div), _reflected(torch.div)
    __itruediv__ = _operator(torch.Tensor.div_)
    __matmul__, __rmatmul__ = _operator(torch.matmul), _reflected(torch.matmul)
    __pow__, __rpow__ = _operator(torch.pow), _reflected(torch.pow)
    __mod__, __rmod__ = _operator(torch.remainder), _reflected(torch.remainder)
    __floordiv__, __rfloordiv__ = _operator(torch.floor_divide), _reflected(torch.floor_divide)
    __neg__, __abs__, __invert__ = _operator(torch.neg), _operator(torch.abs), _operator(torch.bitwise_not)

    # What has no distribution -------------------------------------------------------------------------------

    def _refuse_value(self, *args: Any) -> NoReturn:
        raise UnsupportedError(
            "the code asks for the value of something uncertain (a comparison, an if, .item(), a conversion to a "
            "number or array). Moments have a mean and a variance but no value: decide on a tensor that is certain, on "
            "x.loc if the mean may decide, or write the function as a rule with pyro_dvi.moments.moment_rule. If a "
            "class of torch.distributions asked for it, use the class of the same name in pyro.distributions."
        )

    __bool__ = __float__ = __int__ = __index__ = __complex__ = __array__ = _refuse_value  # type: ignore[assignment]
    __lt__ = __le__ = __gt__ = __ge__ = item = tolist = numpy = _refuse_value  # type: ignore[assignment]

    def __format__(self, spec: str) -> str:
        return self._refuse_value() if spec else str(self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, GaussianMoments | Tensor | int | float):
            self._refuse_value()
        return NotImplemented

    __hash__ = object.__hash__
    __array_ufunc__ = None  # so that numpy numbers on the left leave their operators to us

    def __repr__(self) -> str:
        loc, variance = self.loc.detach(), self.variance.detach()
        if loc.dim() == 0:
            return f"GaussianMoments(loc={loc.item()}, variance={variance.item()})"
        return f"GaussianMoments(loc={loc}, variance={variance})"


class MultiplicativeMoments(GaussianMoments):
    r"""Gaussian weights whose noise multiplies them: :math:`\mathcal N(m, \alpha m^2)`.

    Linear functions of certain or uncertain inputs then need one more product instead of two (see
    :mod:`pyro_dvi.moments.bilinear`). Everything else uses the variance.

    Args:
        loc: m.
        alpha: relative variance, broadcastable to ``loc``.

    Source: Schmitt & Roth (2021), Eq. 5.
    """

    __slots__ = ("_alpha", "_squared")

    def __init__(self, loc: Tensor, alpha: Tensor) -> None:
        super().__init__(loc, loc)
        self._alpha = alpha
        self._squared: Tensor | None = None

    @property
    def alpha(self) -> Tensor:
        """Relative variance."""
        return self._alpha

    @property
    def squared_loc(self) -> Tensor:
        """Squares of the means, computed once."""
        if self._squared is None:
            self._squared = squared(self.loc)
        return self._squared

    @property
    def variance(self) -> Tensor:
        """Variances."""
        if self._squared is None or self._variance is self._loc:
            self._variance = self.alpha * self.squared_loc
        return self._variance

    def become(self, other: GaussianMoments) -> GaussianMoments:
        """Refuse to change weights."""
        raise UnsupportedError(
            "a weight is changed in place, which would change the model for its next use: write w = f(w) with the "
            "function that returns a new tensor"
        )


def _dispatch(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    from pyro_dvi.moments.dispatch import dispatch  # which knows this type

    return dispatch(func, args, kwargs)


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
        "moments are used after a view of them (or what they are a view of) was changed in place; their mean and "
        "variance do not share memory as tensors do. Use the function that returns a new tensor: relu(x) instead of "
        "relu_(x), nn.ReLU(inplace=False)."
    )
