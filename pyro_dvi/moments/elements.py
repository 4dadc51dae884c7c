# SPDX-License-Identifier: Apache-2.0
r"""Functions that move, join, select, sum, convert, read and write elements of mean and variance alike.

Status: exact. Unlike views of tensors, views of moments do not share memory: after one is changed in place, the others
raise an error when used (:meth:`~pyro_dvi.moments.GaussianMoments.alias`). Only changes of ``x[index]`` and
``x.detach()`` are also written into x.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments.dispatch import Kind
from pyro_dvi.moments.quadrature import constants
from pyro_dvi.moments.rules import functions_of, moment_rule
from pyro_dvi.moments.value import GaussianMoments, loc_of, variance_of

_VIEWS = [
    *functions_of(
        torch,
        "reshape flatten ravel unflatten permute transpose swapaxes swapdims movedim moveaxis t adjoint "
        "squeeze unsqueeze broadcast_to narrow select diagonal atleast_1d atleast_2d atleast_3d "
        "split split_with_sizes chunk tensor_split hsplit vsplit dsplit unbind",  # these return tuples
    ),
    *functions_of(torch.Tensor, "reshape unflatten permute squeeze expand unfold split"),
]

_COPIES = [
    *functions_of(
        torch,
        "index_select gather take take_along_dim masked_select tile repeat_interleave roll flip fliplr "
        "flipud rot90 pixel_shuffle pixel_unshuffle channel_shuffle",
    ),
    *functions_of(torch.Tensor, "repeat tile flip"),
]

# These functions add elements or insert zeros, so the link to the Gaussian is lost. Sums are exact for independent
# elements; correlations between running sums are dropped.
_OTHERS: list[Callable] = [
    *functions_of(torch, "sum cumsum tril triu diag diag_embed"),
    *functions_of(F, "unfold fold"),
]


def _certain(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    if any(isinstance(a, GaussianMoments) for a in (*args, *kwargs.values())):
        raise UnsupportedError(f"{name} needs deterministic indices, sizes and masks: pass x.loc")


def _moving(function: Callable, view: bool) -> Callable:
    name = function.__name__

    def move(input: Any, *args: Any, **kwargs: Any) -> Any:
        _certain(name, args, kwargs)
        loc, variance = (function(t, *args, **kwargs) for t in (input.loc, input.variance))
        if isinstance(loc, Tensor):
            result = GaussianMoments(loc, variance)
            return result.alias(input) if view else result
        return tuple(GaussianMoments(*pair).alias(input) for pair in zip(loc, variance, strict=True))

    move.__doc__ = f"Moments of ``{name}``."
    return move


for _function in _VIEWS:
    moment_rule(_function, kind=Kind.REARRANGEMENT)(_moving(_function, view=True))
for _function in _COPIES:
    moment_rule(_function, kind=Kind.REARRANGEMENT)(_moving(_function, view=False))
for _function in _OTHERS:
    moment_rule(_function)(_moving(_function, view=False))


@moment_rule(torch.Tensor.view, kind=Kind.REARRANGEMENT)
def view(input: GaussianMoments, *shape: Any) -> GaussianMoments:
    """Moments of ``x.view(...)``; the variance is reshaped instead, because it may be an expanded tensor."""
    if shape and isinstance(shape[0], torch.dtype):
        raise UnsupportedError("x.view(dtype) reinterprets bits, undefined for moments: use x.to(dtype)")
    return GaussianMoments(input.loc.view(*shape), input.variance.reshape(*shape)).alias(input)


def _following(function: Callable) -> Callable:
    name = function.__name__

    def follow(input: Any, other: Any) -> Any:
        if not isinstance(input, GaussianMoments):
            return function(input, loc_of(other))
        return getattr(input, name.removesuffix("_as"))(other.shape)

    follow.__doc__ = f"Moments of ``{name}``, which uses only the shape of the other argument."
    return follow


for _function in (torch.Tensor.view_as, torch.Tensor.reshape_as, torch.Tensor.expand_as):
    moment_rule(_function)(_following(_function))


@moment_rule(torch.broadcast_tensors)
def broadcast_tensors(*tensors: Any) -> list[Any]:
    """Moments and tensors, broadcast against each other."""
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    return [torch.broadcast_to(t, shape) for t in tensors]


@moment_rule(F.pad)
def pad(
    input: GaussianMoments, pad: Any, mode: str = "constant", value: float | None = None
) -> GaussianMoments:
    """Moments of a padded tensor; constants have variance zero, reflected and repeated values keep their variance."""
    extend = partial(F.pad, pad=pad, mode=mode)
    return GaussianMoments(extend(input.loc, value=value), extend(input.variance))


# Joining ------------------------------------------------------------------------------------------------------

_JOINING = functions_of(torch, "cat concat concatenate stack hstack vstack dstack column_stack row_stack")


def _joining(function: Callable) -> Callable:
    def join(tensors: Sequence[Any], *args: Any, **kwargs: Any) -> GaussianMoments:
        variances = [t.variance if isinstance(t, GaussianMoments) else torch.zeros_like(t) for t in tensors]
        loc = function([loc_of(t) for t in tensors], *args, **kwargs)
        return GaussianMoments(loc, function(variances, *args, **kwargs))

    join.__doc__ = f"Moments of ``{function.__name__}`` of moments and tensors; tensors have variance zero."
    return join


for _function in _JOINING:
    moment_rule(_function)(_joining(_function))


# Selection ----------------------------------------------------------------------------------------------------


@moment_rule(torch.where, kind=Kind.AFFINE)
def where(condition: Any, input: Any = None, other: Any = None) -> GaussianMoments:
    """Moments selected elementwise by a deterministic condition."""
    if isinstance(condition, GaussianMoments):
        raise UnsupportedError("torch.where needs a deterministic condition, such as x.loc > 0")
    loc = torch.where(condition, loc_of(input), loc_of(other))
    zero = constants(0.0, loc)
    first, second = (
        x.variance.to(loc.dtype) if isinstance(x, GaussianMoments) else zero for x in (input, other)
    )
    return GaussianMoments(loc, torch.where(condition, first, second))


@moment_rule(torch.Tensor.where, kind=Kind.AFFINE)
def where_method(input: Any, condition: Any, other: Any) -> GaussianMoments:
    """Moments of ``x.where(condition, other)``, which takes its arguments in another order than ``torch.where``."""
    return where(condition, input, other)


@moment_rule(torch.masked_fill, kind=Kind.AFFINE)
def masked_fill(input: Any, mask: Tensor, value: Any) -> GaussianMoments:
    """Moments where the mask is False, and a constant where it is True."""
    _certain("masked_fill", (mask, value), {})
    return GaussianMoments(input.loc.masked_fill(mask, value), input.variance.masked_fill(mask, 0))


# Reading and writing by index ---------------------------------------------------------------------------------


@moment_rule(torch.Tensor.__getitem__, kind=Kind.REARRANGEMENT)
def getitem(input: Any, index: Any) -> GaussianMoments:
    """Moments of ``x[index]``; a view if indexing a tensor would return one (integers, slices, None, Ellipsis).

    Status: exact.
    """
    _certain("an index", index if isinstance(index, tuple | list) else (index,), {})
    part = GaussianMoments(input.loc[index], input.variance[index])
    return part.alias(input, index) if _is_basic(index) else part


@moment_rule(torch.Tensor.__setitem__)
def setitem(input: Any, index: Any, value: Any) -> None:
    """Write moments or numbers into moments. Earlier views become invalid.

    Status: exact.
    """
    _certain("an index", index if isinstance(index, tuple | list) else (index,), {})
    if not isinstance(input, GaussianMoments):
        raise UnsupportedError(
            "moments cannot be written into a tensor, which has no variance: join parts with torch.stack or torch.cat"
        )
    spread = variance_of(value)
    loc, variance = input.loc.clone(), input.variance.clone()
    loc[index] = loc_of(value)
    variance[index] = 0 if spread is None else spread
    input.become(GaussianMoments(loc, variance))


@moment_rule(torch.Tensor.copy_, torch.Tensor.fill_, torch.fill_, torch.Tensor.zero_, torch.zero_)
def overwrite(input: Any, value: Any = 0, non_blocking: bool = False) -> Any:
    """Overwrite moments with moments or constants."""
    setitem(input, ..., value)
    return input


def _is_basic(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or type(part) in (int, slice) for part in parts)


# Functions that return the same values with another dtype, device or memory, applied to mean and variance alike.
_CONVERSIONS = [
    *functions_of(torch, "clone detach"),
    *functions_of(torch.Tensor, "to type type_as float double half bfloat16 cpu cuda contiguous"),
]

# Functions that use only shape, dtype and device, and return a deterministic tensor.
_LIKE = [
    *functions_of(
        torch,
        "zeros_like ones_like empty_like full_like rand_like randn_like is_floating_point is_complex numel",
    ),
    *functions_of(torch.Tensor, "new_zeros new_ones new_empty new_full new_tensor"),
]


def _converting(function: Callable) -> Callable:
    def convert(input: Any, *args: Any, **kwargs: Any) -> Any:
        # Used only for dtype and device.
        if any(isinstance(a, GaussianMoments) for a in (*args, *kwargs.values())):
            args, kwargs = tuple(map(loc_of, args)), {key: loc_of(value) for key, value in kwargs.items()}
            return getattr(input, function.__name__)(*args, **kwargs)
        loc = function(input.loc, *args, **kwargs)
        if loc is input.loc:
            return input
        if not isinstance(loc, Tensor):
            return loc  # x.type() returns a name
        if not loc.is_floating_point():
            raise UnsupportedError(
                f"moments cannot be converted to {loc.dtype}: rounding to integers has no rule. Convert x.loc instead"
            )
        result = GaussianMoments(loc, function(input.variance, *args, **kwargs))
        return result.alias(input, ...) if function is torch.detach else result

    convert.__doc__ = f"Moments of ``{function.__name__}(x)``: mean and variance are converted."
    return convert


def _describing(function: Callable) -> Callable:
    def describe(input: GaussianMoments, *args: Any, **kwargs: Any) -> Any:
        return function(input.loc, *args, **kwargs)

    describe.__doc__ = f"Deterministic result of ``{function.__name__}``."
    return describe


for _func in _CONVERSIONS:
    moment_rule(_func, kind=Kind.CONVERSION)(_converting(_func))
for _func in _LIKE:
    moment_rule(_func)(_describing(_func))


def _checking(function: Callable, combine: Callable) -> Callable:
    def check(input: GaussianMoments) -> Tensor:
        return combine(function(input.loc), function(input.variance))

    check.__doc__ = f"Result of ``{function.__name__}`` for mean and variance together; deterministic."
    return check


moment_rule(torch.isfinite)(_checking(torch.isfinite, torch.logical_and))
moment_rule(torch.isnan)(_checking(torch.isnan, torch.logical_or))
moment_rule(torch.isinf)(_checking(torch.isinf, torch.logical_or))
