# SPDX-License-Identifier: Apache-2.0
"""Priors: every form of prior_scale has the density that it says, and costs little in a training step."""

import copy
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_dvi.bayesian import FanIn, HierarchicalScale, LearnedScale, fan_in, to_bayesian_
from pyro_dvi.bayesian.placement import placed_like, tensors_of
from pyro_dvi.bayesian.priors import described

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
    (LearnedScale(0.7, shared=True), dist.Normal(0.0, 0.7)),
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


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("unit", "factor"), [(1.0, 1.0), (0.1, 0.1), (fan_in, 0.5)])
def test_hierarchical_density_is_conditional_on_its_scale(shared, unit, factor):
    net = to_bayesian_(nn.Linear(8, 2), HierarchicalScale(dist.HalfCauchy(1.0), unit=unit, shared=shared))
    trace = pyro.poutine.trace(net).get_trace(torch.zeros(1, 8))
    names = ["prior_scale"] if shared else ["bias_scale", "weight_scale"]
    assert sorted(trace.stochastic_nodes) == sorted(["weight", "bias", *names])
    scale = trace.nodes["prior_scale" if shared else "weight_scale"]["value"]
    assert torch.allclose(trace.nodes["weight"]["fn"].base_dist.scale, scale * factor)
    assert isinstance(trace.nodes[names[0]]["fn"], dist.HalfCauchy)


def test_shared_scales_are_shared_by_those_that_get_the_same_object():
    one, other = HierarchicalScale(shared=True), HierarchicalScale(shared=True)
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    to_bayesian_(net, {"0.*": one, "1.*": one, "2.*": other})
    trace = pyro.poutine.trace(net).get_trace(torch.zeros(1, 2))
    scales = {name for name in trace.stochastic_nodes if "scale" in name}
    assert scales == {"prior_scale", "prior_scale_2"}
    second = to_bayesian_(
        nn.Linear(2, 2), one
    )  # the object may serve another network, with a scale of its own
    assert "prior_scale" in pyro.poutine.trace(second).get_trace(torch.zeros(1, 2)).nodes


FAN_INS = [
    (nn.Linear(50, 7), 50),
    (nn.Bilinear(5, 3, 7), 15),
    (nn.Conv2d(6, 9, (3, 5)), 90),
    (nn.Conv2d(6, 9, 3, groups=3), 18),
    (nn.Conv1d(4, 4, 3, groups=4), 3),
    (nn.ConvTranspose2d(6, 9, 4, stride=2), 24),
    (nn.ConvTranspose1d(6, 9, 3, groups=3), 6),
    (nn.MultiheadAttention(8, 2), 8),
]


@pytest.mark.parametrize(("layer", "inputs"), FAN_INS)
def test_fan_in(layer, inputs):
    attribute = "in_proj_weight" if isinstance(layer, nn.MultiheadAttention) else "weight"
    to_bayesian_(layer, fan_in)
    assert layer._pyro_samples[attribute].given.scale.item() == pytest.approx(math.sqrt(2 / inputs))
    bias = attribute.replace("weight", "bias")
    assert layer._pyro_samples[bias].given.scale == 1.0


@pytest.mark.parametrize("layer", [nn.Embedding(9, 5), nn.EmbeddingBag(9, 5)])
def test_embeddings_have_no_fan_in(layer):
    assert to_bayesian_(layer, fan_in)._pyro_samples["weight"].given.scale == 1.0


def test_fan_in_keeps_the_second_moment_of_a_deep_relu_network():
    layers = [layer for _ in range(20) for layer in (nn.Linear(256, 256, bias=False), nn.ReLU())]
    net = to_bayesian_(nn.Sequential(*layers), fan_in)
    x = torch.randn(64, 256)
    ratio = torch.stack([net[:-1](x).square().mean() / 2 / x.square().mean() for _ in range(8)]).mean()
    assert 0.5 < ratio < 2.0


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
        (0.5, "Normal(0, 0.5)"),
        (dist.Laplace(0.0, 1.0), "Laplace(loc=0, scale=1)"),
        (dist.Normal(torch.zeros(2), torch.tensor([1.0, 2.0])), "Normal(loc=0, scale=2 values)"),
        (LearnedScale(), "Normal(0, bias_scale learned)"),
        (HierarchicalScale(unit=0.1), "Normal(0, 0.1·bias_scale), bias_scale ~ LogNormal(loc=0, scale=1)"),
    ],
)
def test_text(prior, text):
    assert to_bayesian_(nn.Linear(3, 2), prior, include="bias")._pyro_samples["bias"].text == text


def test_text_of_distributions_without_parameters():
    assert described(MIXTURE).startswith("MixtureSameFamily")
