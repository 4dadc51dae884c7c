# SPDX-License-Identifier: Apache-2.0
"""Averages of softplus, and of sigmoid on the log scale, over Gaussians of every width."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pyro_dvi.expectations.closed_forms import expected_softplus, logit_of_expected_sigmoid
from pyro_dvi.moments import GaussianMoments

SIGMAS = (0.0, 1e-3, 0.3, 0.99, 1.01, 6.0, 100.0)
MEANS = (-60.0, -9.0, -0.7, 4.0, 300.0)


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("mean", MEANS)
def test_against_fine_quadrature(sigma, mean):
    z = np.linspace(-12, 12, 20_001)
    w = np.exp(-0.5 * z**2)
    w /= w.sum()
    h = torch.from_numpy(mean + sigma * z)
    exact = float(w @ F.softplus(h, threshold=40).numpy())
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-6 * (1 + abs(mean) + sigma))):
        x = GaussianMoments(torch.tensor(mean, dtype=dtype), torch.tensor(sigma, dtype=dtype) ** 2)
        assert abs(expected_softplus(x).item() - exact) < tolerance


@pytest.mark.parametrize("sigma", SIGMAS[:-1])
@pytest.mark.parametrize("mean", (*MEANS[:-1], 60.0))
def test_both_tails_of_the_average_sigmoid_keep_their_digits(sigma, mean):
    z = torch.linspace(-45, 45, 40_001, dtype=torch.float64)
    h = mean + sigma * z
    log_weights = torch.log_softmax(-0.5 * z**2, 0)
    yes, no = (torch.logsumexp(log_weights + F.logsigmoid(f), 0) for f in (h, -h))
    for dtype, tolerance in ((torch.float64, 1e-6), (torch.float32, 1e-5)):
        x = GaussianMoments(torch.tensor(mean, dtype=dtype), torch.tensor(sigma, dtype=dtype) ** 2)
        found = logit_of_expected_sigmoid(x).double()
        torch.testing.assert_close(found, yes - no, rtol=tolerance, atol=tolerance)


def test_gradients():
    m = torch.tensor([-3.0, 0.1, 8.0, -0.4], dtype=torch.float64, requires_grad=True)
    v = torch.tensor([0.2, 1.0, 4.0, 50.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda m, v: expected_softplus(GaussianMoments(m, v)), (m, v))
