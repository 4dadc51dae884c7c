# SPDX-License-Identifier: Apache-2.0
"""Maxima and means over windows, and what resizes images and signals."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.moments.rules import moment_rule
from pyro_dvi.moments.value import GaussianMoments

# Maxima ------------------------------------------------------------------------------------------------------


def _max_pool(function: Callable[..., tuple[Tensor, Tensor]], dims: int) -> Callable[..., GaussianMoments]:
    def max_pool(input: GaussianMoments, *args: Any, **kwargs: Any) -> GaussianMoments:
        """Moments of the element with the largest mean. Status: exact where one is clearly the largest."""
        loc, index = function(input.loc, *args, **kwargs)
        variance = input.variance.flatten(-dims).gather(-1, index.flatten(-dims)).view_as(index)
        return GaussianMoments(loc, variance)

    return max_pool


for _dims in (1, 2, 3):
    for _name in (f"max_pool{_dims}d", f"adaptive_max_pool{_dims}d"):
        moment_rule(getattr(F, _name))(_max_pool(getattr(F, f"{_name}_with_indices"), _dims))
    moment_rule(getattr(torch, f"max_pool{_dims}d"))(
        _max_pool(getattr(F, f"max_pool{_dims}d_with_indices"), _dims)
    )


# Means -------------------------------------------------------------------------------------------------------


def _avg_pool(function: Callable[..., Tensor], dims: int) -> Callable[..., GaussianMoments]:
    def avg_pool(
        input: GaussianMoments,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> GaussianMoments:
        """Moments of means over windows: the variance is the mean variance over the divisor. Status: exact."""
        size, pad = _each(kernel_size, dims), _each(padding, dims)
        options: dict[str, Any] = {
            "stride": kernel_size if stride is None or stride == () else stride,
            "padding": padding,
            "ceil_mode": ceil_mode,
            "count_include_pad": count_include_pad,
        }
        if divisor_override is not None:
            options["divisor_override"] = divisor_override
        weight: Any = 1 / (divisor_override or math.prod(size))
        if divisor_override is None and (ceil_mode or (not count_include_pad and any(pad))):
            weight = _window_weights(function, input.variance, size, options, dims)
        loc, mean = (function(t, kernel_size, **options) for t in (input.loc, input.variance))
        return GaussianMoments(loc, weight * mean)

    return avg_pool


def _window_weights(
    function: Callable[..., Tensor], like: Tensor, size: list[int], options: dict[str, Any], dims: int
) -> Tensor:
    """Return one over the divisor of each window, which is smaller at borders."""
    ones = like.new_ones(1, 1, *like.shape[-dims:])
    mean = function(ones, size, **options)  # elements over divisor
    kernel = like.new_ones(1, 1, *size)
    stride, pad = _each(options["stride"], dims), _each(options["padding"], dims)
    # In ceil mode windows may reach over the end: pad by what they need.
    reach = [
        (out - 1) * s + k - n - p
        for out, s, k, n, p in zip(mean.shape[-dims:], stride, size, ones.shape[-dims:], pad, strict=True)
    ]
    sides = [side for p, r in zip(reversed(pad), reversed(reach), strict=True) for side in (p, r)]
    count = (F.conv1d, F.conv2d, F.conv3d)[dims - 1](F.pad(ones, sides), kernel, stride=stride)
    return (mean / count).reshape(mean.shape[-dims:])


def _each(value: Any, dims: int) -> list[int]:
    values = list(value) if isinstance(value, Sequence) else [value]
    return values * dims if len(values) == 1 else values


def _adaptive_avg_pool(function: Callable[..., Tensor], dims: int) -> Callable[..., GaussianMoments]:
    def adaptive_avg_pool(input: GaussianMoments, output_size: Any) -> GaussianMoments:
        """Moments of means over windows that share out the input. Status: exact."""
        sizes = [
            n if out is None else out
            for n, out in zip(input.shape[-dims:], _each(output_size, dims), strict=True)
        ]
        weight: Any = 1
        for k, (n, out) in enumerate(zip(input.shape[-dims:], sizes, strict=True)):
            if n % out == 0:
                weight = weight * (out / n)
            else:
                windows = [1 / (-(-(i + 1) * n // out) - i * n // out) for i in range(out)]
                weight = weight * input.variance.new_tensor(windows).reshape(-1, *[1] * (dims - 1 - k))
        return GaussianMoments(function(input.loc, sizes), weight * function(input.variance, sizes))

    return adaptive_avg_pool


for _dims in (1, 2, 3):
    _function = getattr(F, f"avg_pool{_dims}d")
    moment_rule(_function)(_avg_pool(_function, _dims))
    _function = getattr(F, f"adaptive_avg_pool{_dims}d")
    moment_rule(_function)(_adaptive_avg_pool(_function, _dims))


# Resizing ------------------------------------------------------------------------------------------------------

# Modes that F.interpolate has for one number of dimensions.
_FLAT = {"linear": "bilinear", "trilinear": "bilinear"}


@moment_rule(F.interpolate)
def interpolate(
    input: GaussianMoments,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> GaussianMoments:
    r"""Moments of resized images, :math:`y = (W_1 \otimes \dots \otimes W_d)x`.

    .. math:: \mathrm{Var}[y] = (W_1^{\circ 2} \otimes \dots \otimes W_d^{\circ 2}) \mathrm{Var}[x]

    Status: exact for independent inputs. The mode "nearest" copies elements; the matrices of the others are read off
    from the function itself, applied to unit vectors.
    """
    options: dict[str, Any] = {
        "align_corners": align_corners,
        "recompute_scale_factor": recompute_scale_factor,
        "antialias": antialias,
    }
    loc = F.interpolate(input.loc, size, scale_factor, mode, **options)
    if mode.startswith("nearest"):
        return GaussianMoments(loc, F.interpolate(input.variance, size, scale_factor, mode, **options))
    dims = input.dim() - 2
    variance = input.variance
    for k in range(dims):
        scale = scale_factor[k] if isinstance(scale_factor, Sequence) else scale_factor
        matrix = _matrix(variance, input.shape[2 + k], loc.shape[2 + k], scale, mode, options)
        variance = torch.movedim(torch.movedim(variance, 2 + k, -1) @ matrix.square(), -1, 2 + k)
    return GaussianMoments(loc, variance)


def _matrix(like: Tensor, n: int, out: int, scale: Any, mode: str, options: dict[str, Any]) -> Tensor:
    """Return the matrix ``[n, out]`` of one dimension: what unit vectors become."""
    units = torch.eye(n, dtype=like.dtype, device=like.device)[:, None, None, :]
    flat = _FLAT.get(mode, mode)
    if scale is None:
        resized = F.interpolate(units, size=(1, out), mode=flat, **options)
    else:
        resized = F.interpolate(units, scale_factor=(1.0, scale), mode=flat, **options)
    return resized[:, 0, 0, :]
