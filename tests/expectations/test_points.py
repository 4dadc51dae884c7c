# SPDX-License-Identifier: Apache-2.0
"""Fixed and shifted points have the moments of Gaussians, and may be made anywhere."""

import math

import pytest
import torch

from pyro_dvi.expectations.points import fixed_points, gauss_hermite, shifted_sobol


def test_shifted_points_are_spread_evenly():
    """Each 1/64 of the probability holds one of the 64 points, in every dimension and call."""
    for _ in range(3):
        u = 0.5 * torch.erfc(-shifted_sobol(64, 5, torch.zeros(1).double()) / math.sqrt(2))
        assert torch.equal((64 * u).long().sort(0).values, torch.arange(64)[:, None].expand(64, 5))


@pytest.mark.parametrize("num_gaussians", [1, 2, 3, 40, 22_000])
def test_fixed_points_have_the_moments_of_gaussians(num_gaussians):
    points, weights = fixed_points(num_gaussians, torch.zeros(1).double())
    again = fixed_points(num_gaussians, torch.zeros(1).double())[0]
    assert points.shape == (len(weights), num_gaussians) and torch.equal(points, again)
    tolerance = 1e-7 if num_gaussians < 3 else 0.1
    torch.testing.assert_close(weights.sum().item(), 1.0)
    assert (weights @ points).abs().mean() < tolerance
    assert (weights @ points**2 - 1).abs().mean() < 1.5 * tolerance
    if num_gaussians == 2:
        assert (weights @ points.prod(1)).abs() < tolerance


def test_points_made_for_inference_serve_training():
    with torch.inference_mode():
        gauss_hermite(7, torch.zeros(1).double())
        fixed_points(3, torch.zeros(1, dtype=torch.float16).double())
        shifted_sobol(8, 11, torch.zeros(1))
    x = torch.ones(7, dtype=torch.float64, requires_grad=True)
    (gauss_hermite(7, x)[0] * x).sum().backward()
    (fixed_points(3, x)[0] * x[:3]).sum().backward()
