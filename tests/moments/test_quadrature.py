# SPDX-License-Identifier: Apache-2.0
"""Functions of functions of a Gaussian are integrated over the Gaussian."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pyro_dvi.moments import GaussianMoments

H = GaussianMoments(torch.linspace(-2, 2, 5, dtype=torch.float64), torch.full((5,), 1.5, dtype=torch.float64))

CHAINS = {
    "root of a variance": lambda h: (F.softplus(h) + 1e-2).sqrt(),
    "root of an exponential": lambda h: torch.exp(h).sqrt(),
    "reciprocal": lambda h: 1 / torch.exp(h),
    "inverse root": lambda h: torch.rsqrt(F.softplus(h) + 0.1),
    "logarithm": lambda h: torch.log(F.softplus(h) + 0.1),
    "moved after a factor for each element": lambda h: (
        (torch.exp(h) * torch.arange(1.0, 6.0, dtype=torch.float64)).flip(-1).sqrt()
    ),
    "log1p": lambda h: torch.log1p(torch.exp(h)),
}


@pytest.mark.parametrize("kind", CHAINS)
def test_chains_agree_with_quadrature(kind):
    chain = CHAINS[kind]
    z, weights = (torch.tensor(a) for a in np.polynomial.hermite_e.hermegauss(60))
    values = chain(H.loc + z[:, None] * H.variance.sqrt())
    weights = (weights / weights.sum())[:, None]
    mean = (weights * values).sum(0)
    variance = (weights * (values - mean).square()).sum(0)
    result = chain(H)
    torch.testing.assert_close(result.loc, mean, rtol=1e-5, atol=0)
    torch.testing.assert_close(result.variance, variance, rtol=1e-4, atol=0)


def test_gradients_reach_the_gaussian():
    loc, variance = H.loc.clone().requires_grad_(), H.variance.clone().requires_grad_()

    def moments(loc, variance):
        result = (F.softplus(GaussianMoments(loc, variance)) + 1e-2).sqrt()
        return result.loc, result.variance

    assert torch.autograd.gradcheck(moments, (loc, variance))


def test_without_variance_it_is_the_function():
    h = GaussianMoments(torch.tensor([-1.0, 2.0]), torch.zeros(2))
    result = (F.softplus(h) + 1e-2).sqrt()
    torch.testing.assert_close(result.loc, (F.softplus(h.loc) + 1e-2).sqrt())
    assert (result.variance < 1e-12).all()
