# SPDX-License-Identifier: Apache-2.0
"""Pooling and interpolation against dense derivatives: both are linear maps, which one depending on the means."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments import GaussianMoments
from tests.moments.multilinear import CHECKS, Case


def doubled(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, -1).repeat_interleave(2, -2)


MAXIMA = [
    Case(F.max_pool1d, ((2, 2, 6),), {"kernel_size": 2}),
    Case(F.max_pool2d, ((2, 2, 5, 6),), {"kernel_size": 3, "stride": 2, "padding": 1}),
    Case(F.max_pool2d, ((2, 5, 6),), {"kernel_size": (1, 2), "ceil_mode": True}),
    Case(F.max_pool2d, ((1, 2, 5, 6),), {"kernel_size": 2, "dilation": 2, "stride": 1}),
    Case(F.max_pool3d, ((1, 2, 4, 3, 2),), {"kernel_size": 2}),
    Case(torch.max_pool1d, ((2, 2, 6),), {"kernel_size": 2}),
    Case(torch.max_pool2d, ((2, 2, 6, 4),), {"kernel_size": 2}),
    Case(torch.max_pool3d, ((1, 2, 4, 3, 2),), {"kernel_size": 2}),
    Case(F.adaptive_max_pool1d, ((2, 2, 5),), {"output_size": 2}),
    Case(F.adaptive_max_pool2d, ((2, 2, 5, 4),), {"output_size": (3, 2)}),
    Case(F.adaptive_max_pool3d, ((1, 2, 3, 2, 4),), {"output_size": 2}),
]
AVERAGES = [
    Case(F.avg_pool1d, ((2, 2, 6),), {"kernel_size": 2}),
    Case(F.avg_pool1d, ((2, 2, 7),), {"kernel_size": 3, "padding": 1, "ceil_mode": True}),
    Case(F.avg_pool1d, ((2, 2, 7),), {"kernel_size": 3, "padding": 1, "count_include_pad": False}),
    Case(F.avg_pool2d, ((2, 2, 5, 6),), {"kernel_size": 3, "stride": 2, "padding": 1}),
    Case(
        F.avg_pool2d,
        ((2, 2, 5, 6),),
        {"kernel_size": (3, 2), "stride": 2, "padding": (1, 0), "ceil_mode": True},
    ),
    Case(
        F.avg_pool2d,
        ((2, 5, 5),),
        {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True, "count_include_pad": False},
    ),
    Case(F.avg_pool2d, ((2, 5, 5),), {"kernel_size": 2, "divisor_override": 3, "ceil_mode": True}),
    Case(F.avg_pool3d, ((1, 1, 5, 4, 3),), {"kernel_size": 2, "ceil_mode": True}),
    Case(F.avg_pool3d, ((1, 1, 4, 4, 3),), {"kernel_size": 2, "padding": 1, "count_include_pad": False}),
    Case(F.adaptive_avg_pool1d, ((2, 2, 5),), {"output_size": 3}),
    Case(F.adaptive_avg_pool2d, ((2, 2, 4, 6),), {"output_size": 1}),
    Case(F.adaptive_avg_pool2d, ((2, 5, 7),), {"output_size": (3, 4)}),
    Case(F.adaptive_avg_pool2d, ((2, 2, 3, 5),), {"output_size": (None, 2)}),
    Case(F.adaptive_avg_pool2d, ((1, 1, 2, 3),), {"output_size": (3, 5)}, note="larger "),
    Case(F.adaptive_avg_pool3d, ((1, 1, 3, 4, 5),), {"output_size": (2, 2, 3)}),
]
RESIZED = [
    Case(F.interpolate, ((1, 2, 3),), {"size": 5}),
    Case(F.interpolate, ((1, 2, 3, 2),), {"scale_factor": 2, "mode": "nearest-exact"}, plain=doubled),
    Case(F.interpolate, ((1, 2, 4),), {"size": 7, "mode": "linear"}),
    Case(F.interpolate, ((1, 2, 4, 3),), {"scale_factor": 2, "mode": "bilinear"}),
    Case(F.interpolate, ((1, 1, 4, 3),), {"scale_factor": (1.7, 2.3), "mode": "bilinear"}),
    Case(
        F.interpolate,
        ((1, 1, 4, 3),),
        {"scale_factor": (1.7, 2.3), "mode": "bilinear", "recompute_scale_factor": True},
    ),
    Case(F.interpolate, ((1, 1, 4, 3),), {"size": (6, 1), "mode": "bilinear", "align_corners": True}),
    Case(F.interpolate, ((1, 1, 7, 8),), {"size": (3, 5), "mode": "bilinear", "antialias": True}),
    Case(F.interpolate, ((1, 1, 5, 4),), {"size": (7, 9), "mode": "bicubic"}),
    Case(F.interpolate, ((1, 1, 7, 9),), {"size": (4, 5), "mode": "bicubic", "antialias": True}),
    Case(F.interpolate, ((1, 1, 5, 7),), {"size": (2, 3), "mode": "area"}),
    Case(F.interpolate, ((1, 1, 3, 2, 4),), {"size": (5, 3, 3), "mode": "trilinear"}),
]
INDICES = [
    Case(F.max_pool1d_with_indices, ((1, 1, 4),), {"kernel_size": 2}),
    Case(F.max_pool2d_with_indices, ((1, 1, 4, 4),), {"kernel_size": 2}),
    Case(F.max_pool3d_with_indices, ((1, 1, 2, 2, 2),), {"kernel_size": 2}),
    Case(F.adaptive_max_pool1d_with_indices, ((1, 1, 4),), {"output_size": 2}),
    Case(F.adaptive_max_pool2d_with_indices, ((1, 1, 4, 4),), {"output_size": 2}),
    Case(F.adaptive_max_pool3d_with_indices, ((1, 1, 2, 2, 2),), {"output_size": 2}),
    Case(torch.max_pool1d_with_indices, ((1, 1, 4),), {"kernel_size": 2}),
    Case(F.max_pool2d, ((1, 1, 4, 4),), {"kernel_size": 2, "return_indices": True}),
    Case(F.adaptive_max_pool2d, ((1, 1, 4, 4),), {"output_size": 2, "return_indices": True}),
]
CASES = MAXIMA + AVERAGES + RESIZED + INDICES


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("case", MAXIMA + AVERAGES + RESIZED, ids=str)
def test_rule(case: Case, check: Callable) -> None:
    check(case)


@pytest.mark.parametrize("case", INDICES, ids=str)
def test_indices_are_refused(case: Case) -> None:
    with pytest.raises(UnsupportedError, match="indices of the largest elements"):
        case(*case.arguments())


def test_modules() -> None:
    x = GaussianMoments(torch.randn(2, 3, 8, 8), torch.rand(2, 3, 8, 8))
    torch.testing.assert_close(torch.nn.AvgPool2d(2)(x).variance, F.avg_pool2d(x.variance, 2) / 4)
    torch.testing.assert_close(torch.nn.AdaptiveAvgPool2d(1)(x).variance, x.variance.mean((2, 3), True) / 64)
    assert torch.nn.MaxPool2d(2)(x).shape == (2, 3, 4, 4)
    assert torch.nn.Upsample(scale_factor=2)(x).shape == (2, 3, 16, 16)


def test_maximum_of_a_clear_winner_is_exact() -> None:
    loc = torch.tensor([[[0.0, 50.0, -3.0, 7.0]]])
    y = F.max_pool1d(GaussianMoments(loc, torch.tensor([[[1.0, 4.0, 2.0, 3.0]]])), 4)
    assert y.loc.item() == 50.0
    assert y.variance.item() == 4.0
