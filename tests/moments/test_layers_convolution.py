# SPDX-License-Identifier: Apache-2.0
"""Convolutions against dense derivatives in float64."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.bilinear import MultiplicativeMoments
from tests.moments.multilinear import CHECKS, FLOAT64, Case

CASES = [
    Case(F.conv1d, ((2, 2, 5), (3, 2, 3), (3,))),
    Case(F.conv1d, ((2, 5), (3, 2, 3)), {"padding": "same"}),
    Case(F.conv1d, ((2, 2, 5), (3, 2, 3)), {"padding": "same"}, noise=(1, 2, 1), cheap=True),
    Case(F.conv2d, ((1, 2, 4, 3), (2, 2, 2, 2))),
    Case(F.conv2d, ((1, 2, 4, 3), (2, 2, 2, 2), (2,)), {"stride": 2, "padding": 1}),
    Case(F.conv2d, ((4, 4, 3), (2, 2, 2, 2), (2,)), {"stride": (1, 2), "padding": (1, 0), "groups": 2}),
    Case(F.conv2d, ((1, 2, 5, 4), (2, 2, 2, 2)), {"dilation": 2, "padding": "valid"}),
    Case(F.conv2d, ((1, 2, 4, 3), (2, 2, 2, 2), (2,)), noise=(1, 2, 1, 1), cheap=True),
    Case(F.conv2d, ((2, 4, 3), (2, 2, 2, 2)), {"padding": 1}, noise=(2, 1, 1), cheap=True, note="one image "),
    Case(F.conv2d, ((1, 2, 3, 3), (2, 2, 2, 2)), noise=(), cheap=True),
    Case(F.conv2d, ((1, 2, 3, 3), (3, 2, 2, 2)), noise=(3, 1, 1, 1)),
    Case(F.conv2d, ((1, 2, 3, 3), (3, 2, 2, 2)), noise=(1, 2, 2, 2)),
    Case(F.conv2d, ((1, 4, 3, 3), (4, 2, 2, 2)), {"groups": 2}, noise=(1, 2, 1, 1), cheap=True),
    Case(F.conv2d, ((1, 4, 3, 3), (4, 2, 2, 2)), {"groups": 2}, noise=(4, 2, 1, 1)),
    Case(F.conv2d, ((1, 4, 3, 3), (2, 2, 2, 2)), {"groups": 2}, noise=(2, 2, 1, 1), cheap=True),
    Case(F.conv2d, ((1, 4, 3, 3), (2, 2, 2, 2)), {"groups": 2}, noise=(2, 1, 1, 1), cheap=True),
    Case(F.conv2d, ((1, 3, 3, 3), (3, 1, 2, 2)), {"groups": 3}, noise=(3, 1, 1, 1), cheap=True),
    Case(F.conv2d, ((1, 3, 3, 3), (3, 1, 2, 2)), {"groups": 3}, noise=(1, 1, 1, 1), cheap=True),
    Case(F.conv3d, ((1, 2, 3, 2, 2), (2, 2, 2, 2, 1), (2,)), {"padding": (1, 0, 0), "stride": 2}),
    Case(F.conv3d, ((1, 2, 3, 2, 2), (2, 2, 2, 2, 2)), noise=(1, 2, 1, 1, 1), cheap=True),
    Case(F.conv_transpose1d, ((2, 2, 3), (2, 3, 2), (3,)), {"stride": 2, "output_padding": 1}),
    Case(F.conv_transpose1d, ((2, 2, 4), (2, 3, 3)), noise=(2, 1, 1)),
    Case(F.conv_transpose2d, ((1, 2, 3, 2), (2, 2, 2, 2), (2,)), {"padding": 1, "stride": 2}),
    Case(F.conv_transpose2d, ((1, 4, 2, 2), (4, 1, 2, 2)), {"groups": 2, "dilation": 2}),
    Case(F.conv_transpose2d, ((1, 4, 2, 2), (4, 1, 2, 2)), {"groups": 2}, noise=(4, 1, 1, 1)),
    Case(F.conv_transpose2d, ((4, 2, 2), (4, 2, 2, 2)), noise=(4, 2, 1, 1)),
    Case(F.conv_transpose2d, ((4, 2, 2), (4, 2, 2, 2)), noise=(2, 1, 1)),
    Case(F.conv_transpose3d, ((1, 2, 2, 2, 1), (2, 2, 2, 1, 2), (2,)), {"stride": 2}),
    Case(F.conv_transpose3d, ((1, 2, 2, 2, 1), (2, 2, 2, 2, 2)), noise=(2, 1, 1, 1, 1)),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule(case: Case, check: Callable) -> None:
    check(case)


@pytest.mark.parametrize("case", [c for c in CASES if c.cheap], ids=str)
def test_noise_of_channels_takes_one_product(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: MultiplicativeMoments) -> None:
        raise AssertionError("the variance of every weight was computed")

    arguments = case.arguments()
    monkeypatch.setattr(MultiplicativeMoments, "variance", property(refuse))
    case(*arguments)


@pytest.mark.parametrize("mode", ["zeros", "reflect", "circular"])
def test_module_with_uncertain_weights(mode: str) -> None:
    layer = nn.Conv2d(2, 3, 3, padding=1, padding_mode=mode).double()
    x = GaussianMoments(torch.randn(2, 2, 4, 4, dtype=FLOAT64), torch.rand(2, 2, 4, 4, dtype=FLOAT64))
    expected = layer(x)
    weight, bias = layer.weight.detach(), layer.bias.detach()
    del layer.weight, layer.bias
    uncertain = {
        "weight": GaussianMoments(weight, torch.full_like(weight, 0.1)),
        "bias": GaussianMoments(bias, torch.full_like(bias, 0.2)),
    }
    vars(layer).update(uncertain)
    y = layer(x)
    torch.testing.assert_close(y.loc, expected.loc)
    second = torch.ones(3, 2, 3, 3, dtype=FLOAT64)
    pad = (1, 1, 1, 1)
    square = F.pad(x.loc.square() + x.variance, pad, "constant" if mode == "zeros" else mode)
    torch.testing.assert_close(y.variance, expected.variance + 0.1 * F.conv2d(square, second) + 0.2)


@pytest.mark.parametrize("function", [F.conv2d, F.conv_transpose2d])
def test_autocast_chooses_the_dtype_of_a_convolution(function: Callable) -> None:
    x, weight = GaussianMoments(torch.randn(2, 3, 4, 4), torch.rand(2, 3, 4, 4)), torch.randn(3, 3, 3, 3)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = function(x, weight), function(x.loc, weight)
    assert y.loc.dtype == y.variance.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(y.loc, expected)
