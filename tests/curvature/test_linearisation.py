# SPDX-License-Identifier: Apache-2.0
"""Weighted squares of gradients, summed over sites, against their formula."""

import pyro.distributions as dist
import pytest
import torch

from pyro_dvi.curvature.linearisation import ObservedSite, half_sum, half_weighted_squares

SHAPES = [(3,), (2, 3), (), (1, 2, 2)]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("constant", ["neither", "scales", "gradients"])
def test_half_weighted_squares_have_the_gradients_of_their_formula(shared, constant):
    torch.manual_seed(0)
    scales = [torch.rand([1] * len(shape) if shared else shape, dtype=torch.float64) for shape in SHAPES]
    gradients = [torch.randn(shape, dtype=torch.float64) for shape in SHAPES]
    for name, part in (("scales", scales), ("gradients", gradients)):
        for each in part:
            each.requires_grad_(name != constant)
    found, expected = (
        half_weighted_squares(scales, gradients),
        half_sum(scales, [g.square() for g in gradients]),
    )
    torch.testing.assert_close(found, expected)
    inputs = [each for each in scales + gradients if each.requires_grad]
    torch.testing.assert_close(
        torch.autograd.grad(1.7 * found, inputs), torch.autograd.grad(1.7 * expected, inputs)
    )


@pytest.mark.parametrize("rows", [300, 10_000])
def test_half_weighted_squares_in_single_precision(rows):
    torch.manual_seed(0)
    scales, gradients = ([1e-2 * torch.rand(rows, 200).double()] for _ in range(2))
    exact = half_sum(scales, [g.square() for g in gradients])
    single = half_weighted_squares([s.float() for s in scales], [g.float() for g in gradients])
    assert single.item() == pytest.approx(exact.item(), rel=1e-6)


@pytest.mark.parametrize("value", [torch.zeros(3).double(), torch.zeros(3).long()], ids=["float64", "labels"])
def test_the_scale_of_observations_is_not_rounded_to_single_precision(value):
    fn = dist.Normal(torch.zeros(3, dtype=torch.float64), 1.0)
    keep = torch.tensor([True, False, True])
    for mask, expected in ((None, [1 / 3] * 3), (keep, [1 / 3, 0.0, 1 / 3]), (False, [0.0] * 3)):
        assert ObservedSite("y", fn, value, 1 / 3, mask).weights.tolist() == expected
    tensor = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    assert ObservedSite("y", fn, value, tensor, keep).weights.tolist() == [0.1, 0.0, 0.3]


def test_weights_are_on_the_device_of_the_values(device):
    value = torch.zeros(3, device=device)
    fn, keep = dist.Normal(value, 1.0), torch.tensor([True, False, True], device=device)
    for mask in (None, False, keep):
        assert ObservedSite("y", fn, value, 2.0, mask).weights.device == device
