# SPDX-License-Identifier: Apache-2.0
"""Functions that move elements: what they do to the mean they do to the variance.

Status: exact, all of them. Mean and variance cannot be written through these views as through those of tensors: a
change in place makes the other views unusable (:meth:`~pyro_dvi.moments.GaussianMoments.alias`), which raises an error
instead of giving old values. Only ``x[index]`` writes through.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments.rules import Kind, functions_of, moment_rule
from pyro_dvi.moments.value import GaussianMoments, loc_of

__all__ = ["fold", "masked_fill", "view"]

_VIEWS = [
    *functions_of(
        torch,
        "reshape flatten ravel unflatten permute transpose swapaxes swapdims movedim moveaxis t adjoint "
        "squeeze unsqueeze broadcast_to narrow select diagonal atleast_1d atleast_2d atleast_3d",
    ),
    *functions_of(torch.Tensor, "reshape unflatten permute squeeze expand unfold"),
]

# Views too, as tuples.
_PARTS = [
    *functions_of(torch, "split split_with_sizes chunk tensor_split hsplit vsplit dsplit unbind"),
    *functions_of(torch.Tensor, "split"),
]

_COPIES = [
    *functions_of(
        torch,
        "index_select gather take take_along_dim masked_select tile repeat_interleave roll flip fliplr "
        "flipud rot90 pixel_shuffle pixel_unshuffle channel_shuffle",
    ),
    *functions_of(torch.Tensor, "repeat tile flip"),
]

# Elements besides those that move are zero, so a link to the Gaussian behind them is lost.
_ZEROING: tuple[Callable, ...] = (torch.tril, torch.triu, torch.diag, torch.diag_embed, F.unfold)


def _certain(name: str, args: tuple, kwargs: dict[str, Any]) -> None:
    if any(isinstance(a, GaussianMoments) for a in (*args, *kwargs.values())):
        raise UnsupportedError(
            f"{name} takes indices, sizes and masks that are certain: pass a tensor, such as x.loc"
        )


def _moving(function: Callable, view: bool) -> Callable:
    name = function.__name__

    def move(input: Any, *args: Any, **kwargs: Any) -> GaussianMoments:
        _certain(name, args, kwargs)
        result = GaussianMoments(
            function(input.loc, *args, **kwargs), function(input.variance, *args, **kwargs)
        )
        return result.alias(input) if view else result

    move.__doc__ = f"Moments of ``{name}``."
    return move


def _parting(function: Callable) -> Callable:
    def part(input: GaussianMoments, *args: Any, **kwargs: Any) -> tuple[GaussianMoments, ...]:
        _certain(function.__name__, args, kwargs)
        pairs = zip(
            function(input.loc, *args, **kwargs), function(input.variance, *args, **kwargs), strict=True
        )
        parts = tuple(GaussianMoments(loc, variance) for loc, variance in pairs)
        input.divided_into(parts)
        return parts

    part.__doc__ = f"Moments of the parts of ``{function.__name__}``."
    return part


for _function in _VIEWS:
    moment_rule(_function, kind=Kind.REARRANGEMENT)(_moving(_function, view=True))
for _function in _COPIES:
    moment_rule(_function, kind=Kind.REARRANGEMENT)(_moving(_function, view=False))
for _function in _ZEROING:
    moment_rule(_function)(_moving(_function, view=False))
for _function in _PARTS:
    moment_rule(_function, kind=Kind.REARRANGEMENT)(_parting(_function))


@moment_rule(torch.Tensor.view, kind=Kind.REARRANGEMENT)
def view(input: GaussianMoments, *shape: Any) -> GaussianMoments:
    """Moments of ``x.view(...)``; the variance may be expanded where the mean is not, so it is reshaped."""
    if shape and isinstance(shape[0], torch.dtype):
        raise UnsupportedError(
            "x.view(dtype) reinterprets bits, which means nothing for moments: use x.to(dtype)"
        )
    return GaussianMoments(input.loc.view(*shape), input.variance.reshape(*shape)).alias(input)


def _following(function: Callable) -> Callable:
    name = function.__name__

    def follow(input: Any, other: Any) -> Any:
        if not isinstance(input, GaussianMoments):
            return function(input, loc_of(other))
        return getattr(input, name.removesuffix("_as"))(other.shape)

    follow.__doc__ = f"Moments of ``{name}``, which asks the other for its shape only."
    return follow


for _function in (torch.Tensor.view_as, torch.Tensor.reshape_as, torch.Tensor.expand_as):
    moment_rule(_function)(_following(_function))


@moment_rule(torch.broadcast_tensors)
def broadcast_tensors(*tensors: Any) -> list[Any]:
    """Moments and tensors, broadcast against each other."""
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    return [torch.broadcast_to(t, shape) for t in tensors]


@moment_rule(F.fold)
def fold(input: GaussianMoments, *args: Any, **kwargs: Any) -> GaussianMoments:
    """Moments of ``fold``, which adds what overlaps.

    Status: exact for independent elements.
    """
    return _moving(F.fold, view=False)(input, *args, **kwargs)


@moment_rule(F.pad)
def pad(
    input: GaussianMoments, pad: Any, mode: str = "constant", value: float | None = None
) -> GaussianMoments:
    """Moments of a padded tensor; a constant is certain, reflected and repeated borders are as uncertain as inside."""
    extend = partial(F.pad, pad=pad, mode=mode)
    return GaussianMoments(extend(input.loc, value=value), extend(input.variance))


@moment_rule(torch.masked_fill, kind=Kind.AFFINE)
def masked_fill(input: Any, mask: Tensor, value: Any) -> GaussianMoments:
    """GaussianMoments where the mask is False, and a certain value where it is True."""
    _certain("masked_fill", (mask, value), {})
    return GaussianMoments(input.loc.masked_fill(mask, value), input.variance.masked_fill(mask, 0))


@moment_rule(torch.where, kind=Kind.AFFINE)
def where(condition: Any, input: Any = None, other: Any = None) -> GaussianMoments:
    """GaussianMoments chosen element by element by a certain condition."""
    if isinstance(condition, GaussianMoments) or input is None or other is None:
        raise UnsupportedError("torch.where takes a condition that is certain, and two things to choose from")
    loc = torch.where(condition, loc_of(input), loc_of(other))
    zero = loc.new_zeros(())
    first, second = (
        x.variance.to(loc.dtype) if isinstance(x, GaussianMoments) else zero for x in (input, other)
    )
    return GaussianMoments(loc, torch.where(condition, first, second))


@moment_rule(torch.Tensor.where, kind=Kind.AFFINE)
def where_method(input: Any, condition: Any, other: Any) -> GaussianMoments:
    """Moments of ``x.where(condition, other)``, whose arguments come in another order."""
    return where(condition, input, other)
