# SPDX-License-Identifier: Apache-2.0
"""Convolutions and their transposes: linear layers whose map is a convolution.

Status: exact for independent inputs and weights, with every stride, padding, dilation and number of groups. Outputs at
different positions share weights and are correlated; the next layer takes them as independent.

Source: Schmitt & Roth (2021), Eq. 9, :mod:`pyro_dvi.moments.bilinear`.
"""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.moments.bilinear import MultiplicativeMoments, bilinear_moments
from pyro_dvi.moments.rules import moment_rule
from pyro_dvi.moments.value import GaussianMoments, loc_of

__all__: list[str] = []


def _convolution(function: Callable[..., Tensor], dims: int) -> Callable[..., GaussianMoments]:
    def convolution(
        input: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> GaussianMoments:
        def product(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
            return function(x, w, b, stride, padding, dilation, groups)

        return _layer(product, input, weight, bias, _alpha_of_inputs(weight, groups), dims)

    return convolution


def _transposed(function: Callable[..., Tensor], dims: int) -> Callable[..., GaussianMoments]:
    def convolution_transpose(
        input: Any,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> GaussianMoments:
        def product(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
            return function(x, w, b, stride, padding, output_padding, groups, dilation)

        return _layer(product, input, weight, bias, _alpha_of_transposed_inputs(weight), dims)

    return convolution_transpose


conv1d = moment_rule(F.conv1d)(_convolution(F.conv1d, 1))
conv2d = moment_rule(F.conv2d)(_convolution(F.conv2d, 2))
conv3d = moment_rule(F.conv3d)(_convolution(F.conv3d, 3))
conv_transpose1d = moment_rule(F.conv_transpose1d)(_transposed(F.conv_transpose1d, 1))
conv_transpose2d = moment_rule(F.conv_transpose2d)(_transposed(F.conv_transpose2d, 2))
conv_transpose3d = moment_rule(F.conv_transpose3d)(_transposed(F.conv_transpose3d, 3))


def _layer(
    product: Callable[..., Tensor], input: Any, weight: Any, bias: Any, alpha: Tensor | None, dims: int
) -> GaussianMoments:
    if isinstance(input, GaussianMoments) or isinstance(weight, GaussianMoments):
        return bilinear_moments(product, input, weight, alpha, bias)
    return GaussianMoments(product(input, weight, loc_of(bias)), bias.variance.reshape(-1, *[1] * dims))


def _alpha_of_inputs(weight: Any, groups: int) -> Tensor | None:
    """Noise that belongs to input channels, as ``[in, 1, ...]``; None for any other noise.

    The weight ``[out, in / groups, ...]`` of the k-th group sees the k-th part of the channels. A row of noise
    ``[1, in / groups, 1, ...]`` is the same for all groups. With one output channel per group, ``[out, in / groups,
    1, ...]`` has a row for each.
    """
    if not isinstance(weight, MultiplicativeMoments):
        return None
    alpha, dims = weight.alpha, weight.dim()
    alpha = alpha.reshape(*[1] * (dims - alpha.dim()), *alpha.shape)
    if any(size != 1 for size in alpha.shape[2:]):
        return None
    ones = [1] * (dims - 2)
    rows, columns = alpha.shape[:2]
    if rows == 1:
        alpha = alpha.reshape(columns, *ones)
        return alpha if groups == 1 or columns == 1 else alpha.repeat(groups, *ones)
    if rows == groups == weight.shape[0]:
        return alpha.expand(-1, weight.shape[1], *ones).reshape(-1, *ones)
    return None


def _alpha_of_transposed_inputs(weight: Any) -> Tensor | None:
    """Likewise for the weight ``[in, out / groups, ...]`` of a transposed convolution: noise ``[in, 1, ...]``."""
    if not isinstance(weight, MultiplicativeMoments):
        return None
    alpha, dims = weight.alpha, weight.dim()
    alpha = alpha.reshape(*[1] * (dims - alpha.dim()), *alpha.shape)
    return alpha[:, 0] if all(size == 1 for size in alpha.shape[1:]) else None
