# SPDX-License-Identifier: Apache-2.0
"""Copies, other dtypes and devices, and new tensors of the same shape."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments.dispatch import Kind
from pyro_dvi.moments.rules import functions_of, moment_rule
from pyro_dvi.moments.value import GaussianMoments, loc_of

# Functions that give the same values in another guise: what applies to the mean applies to the variance.
_CONVERSIONS = [
    *functions_of(torch, "clone detach"),
    *functions_of(torch.Tensor, "to type type_as float double half bfloat16 cpu cuda contiguous"),
]

# Functions that ask for shape, dtype and device only, and return a tensor that is certain.
_LIKE = [
    *functions_of(
        torch,
        "zeros_like ones_like empty_like full_like rand_like randn_like is_floating_point is_complex numel",
    ),
    *functions_of(torch.Tensor, "new_zeros new_ones new_empty new_full new_tensor"),
]


def _converting(function: Callable) -> Callable:
    def convert(input: Any, *args: Any, **kwargs: Any) -> Any:
        if any(
            isinstance(a, GaussianMoments) for a in (*args, *kwargs.values())
        ):  # asked for dtype and device only
            args, kwargs = tuple(map(loc_of, args)), {key: loc_of(value) for key, value in kwargs.items()}
            return getattr(input, function.__name__)(*args, **kwargs)
        loc = function(input.loc, *args, **kwargs)
        if loc is input.loc:
            return input
        if not isinstance(loc, Tensor):
            return loc  # x.type() is a name
        if not loc.is_floating_point():
            raise UnsupportedError(
                f"moments cannot become {loc.dtype}: rounding to integers or truth values has no rule. Decide on x.loc"
            )
        result = GaussianMoments(loc, function(input.variance, *args, **kwargs))
        return result.alias(input, ...) if function is torch.detach else result

    convert.__doc__ = f"Moments of ``{function.__name__}(x)``, applied to mean and variance."
    return convert


def _describing(function: Callable) -> Callable:
    def describe(input: GaussianMoments, *args: Any, **kwargs: Any) -> Any:
        return function(input.loc, *args, **kwargs)

    describe.__doc__ = f"Result of ``{function.__name__}``, which is certain."
    return describe


for _function in _CONVERSIONS:
    moment_rule(_function, kind=Kind.CONVERSION)(_converting(_function))
for _function in _LIKE:
    moment_rule(_function)(_describing(_function))


@moment_rule(torch.Tensor.requires_grad_)
def requires_grad_(input: GaussianMoments, requires_grad: bool = True) -> GaussianMoments:
    """Record gradients with respect to the mean."""
    input.loc.requires_grad_(requires_grad)
    return input


def _checking(function: Callable, combine: Callable) -> Callable:
    def check(input: GaussianMoments) -> Tensor:
        return combine(function(input.loc), function(input.variance))

    check.__doc__ = f"Result of ``{function.__name__}`` for mean and variance together, which is certain."
    return check


is_finite = moment_rule(torch.isfinite)(_checking(torch.isfinite, torch.logical_and))
moment_rule(torch.isnan)(_checking(torch.isnan, torch.logical_or))
moment_rule(torch.isinf)(_checking(torch.isinf, torch.logical_or))
