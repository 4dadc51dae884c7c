# SPDX-License-Identifier: Apache-2.0
"""Scales of priors: by the number of inputs, and those that have a prior of their own."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_dvi.bayesian import HierarchicalScale, fan_in, to_bayesian_


@pytest.mark.parametrize(("unit", "factor"), [(1.0, 1.0), (0.1, 0.1), (fan_in, 0.5)])
def test_hierarchical_density_is_conditional_on_its_scale(unit, factor):
    net = to_bayesian_(nn.Linear(8, 2), HierarchicalScale(dist.HalfCauchy(1.0), unit=unit))
    trace = pyro.poutine.trace(net).get_trace(torch.zeros(1, 8))
    assert sorted(trace.stochastic_nodes) == ["bias", "bias_scale", "weight", "weight_scale"]
    scale = trace.nodes["weight_scale"]["value"]
    assert torch.allclose(trace.nodes["weight"]["fn"].base_dist.scale, scale * factor)
    assert isinstance(trace.nodes["weight_scale"]["fn"], dist.HalfCauchy)


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
