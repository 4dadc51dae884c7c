# SPDX-License-Identifier: Apache-2.0
"""Heads of networks as users write them, with the rules of the moments chapter, against samples of their inputs."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import distributions as td

from pyro_dvi.expectations import Sobol
from pyro_dvi.expectations.expectation import expected_log_prob
from pyro_dvi.links import GaussHermite
from pyro_dvi.links.families import predictive_distribution
from pyro_dvi.moments import GaussianMoments

N = 40_000
Y = torch.tensor([0.3, -1.0, 0.8, 2.0], dtype=torch.float64)
K = torch.tensor([0, 1, 2, 0])
HEADS: dict[str, Callable[[Any], tuple[Any, dict[str, Any], Any]]] = {
    "exp": lambda h: (td.Normal, {"loc": h[..., 0], "scale": torch.exp(0.5 * h[..., 1])}, Y),
    "exp before indexing": lambda h: (td.Normal, {"loc": h[..., 0], "scale": torch.exp(0.5 * h)[..., 1]}, Y),
    "softplus and shift": lambda h: (
        td.Normal,
        {"loc": h[..., 0], "scale": F.softplus(h[..., 1]) + 0.01},
        Y,
    ),
    "split": lambda h: (
        td.Laplace,
        {"loc": h.split(1, -1)[0].squeeze(-1), "scale": F.softplus(h.split(1, -1)[1]).squeeze(-1) + 0.01},
        Y,
    ),
    "clamped": lambda h: (td.Normal, {"loc": h[..., 0], "scale": h[..., 1].clamp(-3.0, 2.0).exp()}, Y),
    "logits": lambda h: (td.Categorical, {"logits": 2 * h}, K),
    "log_softmax": lambda h: (td.Categorical, {"logits": F.log_softmax(h, -1)}, K),
    "softmax": lambda h: (td.Categorical, {"probs": h.softmax(-1)}, K),
    "sigmoid": lambda h: (td.Bernoulli, {"probs": torch.sigmoid(h[..., 0])}, (K > 0).double()),
    "rate": lambda h: (td.Poisson, {"rate": h[..., 0].exp()}, K.double()),
    "two parameters": lambda h: (
        td.Gamma,
        {"concentration": F.softplus(h[..., 0]) + 0.1, "rate": F.softplus(h[..., 1]) + 0.1},
        Y.abs(),
    ),
    "three parameters": lambda h: (
        td.StudentT,
        {"df": F.softplus(h[..., 2]) + 2, "loc": h[..., 0], "scale": h[..., 1].exp()},
        Y,
    ),
}


@pytest.mark.parametrize("head", HEADS)
def test_against_samples(head):
    """A z-test of four numbers at five standard errors, with .01 for quadrature; the seed is fixed."""
    generator = torch.Generator().manual_seed(11)
    shape = {"generator": generator, "dtype": torch.float64}
    x = GaussianMoments(torch.randn(4, 3, **shape), 0.5 * torch.rand(4, 3, **shape))
    family, parameters, value = HEADS[head](x)
    _, sampled, _ = HEADS[head](x.loc + x.variance.sqrt() * torch.randn(N, 4, 3, **shape))
    log_prob = family(**sampled).log_prob(value)

    ours = expected_log_prob(family, parameters, value, Sobol(2**10))
    assert ((ours - log_prob.mean(0)).abs() < 5 * log_prob.std(0) / math.sqrt(N) + 0.01).all()

    predictive = predictive_distribution(family, parameters, noise=GaussHermite(32))
    density = log_prob.exp()
    error = 5 * density.std(0) / math.sqrt(N) + 0.01 * density.mean(0)
    assert ((predictive.log_prob(value).exp() - density.mean(0)).abs() < error).all()
