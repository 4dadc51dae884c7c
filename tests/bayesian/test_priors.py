# SPDX-License-Identifier: Apache-2.0
"""Priors: every form of prior_scale has the density that it says, and costs little in a training step."""

import copy
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_dvi.bayesian import HierarchicalScale, LearnedScale, fan_in, summary, to_bayesian_
from pyro_dvi.bayesian.overview import described
from pyro_dvi.bayesian.priors import FanIn
from pyro_dvi.core.distributions import placed_like, tensors_of

FULL = dist.Normal(torch.arange(6.0).reshape(2, 3), 2.0)

DENSITIES = [
    (0.5, dist.Normal(0.0, 0.5)),
    (2, dist.Normal(0.0, 2.0)),
    (torch.tensor(0.5), dist.Normal(0.0, 0.5)),
    (fan_in, dist.Normal(0.0, math.sqrt(2 / 3))),
    (FanIn(gain=1.0), dist.Normal(0.0, math.sqrt(1 / 3))),
    (dist.Laplace(1.0, 3.0), dist.Laplace(1.0, 3.0)),
    (dist.StudentT(3.0), dist.StudentT(3.0)),
    (FULL, FULL),
    (FULL.to_event(1), FULL),
    (FULL.to_event(2), FULL),
    (
        dist.Normal(torch.zeros(2, 1), torch.tensor([[1.0], [2.0]])),
        dist.Normal(0.0, torch.tensor([[1.0], [2.0]])),
    ),
    (lambda name, parameter: 0.3 * parameter.dim(), dist.Normal(0.0, 0.6)),
    (lambda name, parameter: dist.Cauchy(0.0, 1.0), dist.Cauchy(0.0, 1.0)),
    (lambda name, parameter: LearnedScale(0.7), dist.Normal(0.0, 0.7)),
    ({"w?ight": dist.Laplace(0.0, 1.0), "*": 1.0}, dist.Laplace(0.0, 1.0)),
    ({"w*": {"*": fan_in}}, dist.Normal(0.0, math.sqrt(2 / 3))),
    (LearnedScale(0.7), dist.Normal(0.0, 0.7)),
    (LearnedScale(fan_in), dist.Normal(0.0, math.sqrt(2 / 3))),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("prior", "expected"), DENSITIES)
def test_density(prior, expected, dtype):
    net = to_bayesian_(nn.Linear(3, 2).to(dtype), copy.deepcopy(prior), include="weight")
    net.to(dtype)
    site = pyro.poutine.trace(net).get_trace(torch.zeros(1, 3, dtype=dtype)).nodes["weight"]
    value = torch.randn(2, 3, dtype=dtype)
    log_prob = site["fn"].log_prob(value)
    assert log_prob.shape == () and log_prob.dtype is dtype
    # The prior of a user was made in the default dtype, and is no sharper than that.
    tolerance = 1e-5 if dtype is torch.float32 else 1e-6
    reference = placed_like(expected, value).log_prob(value)
    assert log_prob.item() == pytest.approx(reference.expand(2, 3).sum().item(), rel=tolerance)
    assert site["fn"].event_shape == (2, 3) and site["fn"].batch_shape == ()


MIXTURE = dist.MixtureSameFamily(
    dist.Categorical(torch.ones(2)), dist.Normal(torch.zeros(2), torch.tensor([0.1, 1.0]))
)
PLACED = [
    dist.Normal(0.0, 1.0),
    dist.LogNormal(0.0, 1.0),
    dist.Laplace(0.0, 1.0).expand([3]).to_event(1),
    MIXTURE,
    dist.MultivariateNormal(torch.zeros(2), torch.eye(2)),
    dist.TransformedDistribution(
        dist.Normal(0.0, 1.0), [dist.transforms.AffineTransform(torch.ones(1), 2.0)]
    ),
]


@pytest.mark.parametrize("given", PLACED, ids=lambda value: type(value).__name__)
def test_distributions_are_moved_whole(given):
    before = [tensor.dtype for tensor in tensors_of(given)]
    moved = placed_like(given, torch.zeros((), dtype=torch.float64))
    value = moved.sample()
    assert value.dtype is torch.float64
    assert torch.isfinite(moved.log_prob(value)).all()
    assert moved.log_prob(value).dtype is torch.float64
    assert all(tensor.dtype is torch.float64 for tensor in tensors_of(moved) if tensor.is_floating_point())
    assert [tensor.dtype for tensor in tensors_of(given)] == before
    assert placed_like(given, torch.zeros(())) is given  # in place already: shared


@pytest.mark.parametrize(
    ("prior", "text"),
    [
        (0.5, "Normal(loc=0, scale=0.5)"),
        (dist.Laplace(0.0, 1.0), "Laplace(loc=0, scale=1)"),
        (dist.Normal(torch.zeros(2), torch.tensor([1.0, 2.0])), "Normal(loc=0, scale=2 values)"),
        (LearnedScale(), "Normal(0, 1·bias_scale)"),
        (HierarchicalScale(unit=0.1), "Normal(0, 0.1·bias_scale)"),
    ],
)
def test_text(prior, text):
    assert summary(to_bayesian_(nn.Linear(3, 2), prior, include="bias"))["prior"][-1] == text


def test_text_of_distributions_without_parameters():
    assert described(MIXTURE).startswith("MixtureSameFamily")
