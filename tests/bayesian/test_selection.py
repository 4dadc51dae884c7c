# SPDX-License-Identifier: Apache-2.0
"""Which parameters become Bayesian: by default, by name, by class and by rule."""

import copy

import pytest
import torch
from torch import Tensor, nn

from pyro_dvi.bayesian import (
    to_bayesian_,
)
from tests.bayesian.latents import sites

LAYERS = [
    (nn.Linear(3, 2), (3,), ["weight", "bias"]),
    (nn.Bilinear(3, 3, 2), (3,), ["weight", "bias"]),
    (nn.Conv1d(2, 3, 2), (2, 5), ["weight", "bias"]),
    (nn.Conv2d(2, 3, 2, bias=False), (2, 5, 5), ["weight"]),
    (nn.Conv3d(2, 3, 2), (2, 4, 4, 4), ["weight", "bias"]),
    (nn.ConvTranspose1d(2, 3, 2), (2, 5), ["weight", "bias"]),
    (nn.ConvTranspose2d(2, 3, 2), (2, 5, 5), ["weight", "bias"]),
    (nn.ConvTranspose3d(2, 3, 2), (2, 4, 4, 4), ["weight", "bias"]),
    (
        nn.MultiheadAttention(4, 2, batch_first=True),
        (3, 4),
        ["in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"],
    ),
    (
        nn.MultiheadAttention(4, 2, kdim=3, vdim=3, batch_first=True, add_bias_kv=True),
        None,
        [
            "q_proj_weight",
            "k_proj_weight",
            "v_proj_weight",
            "in_proj_bias",
            "bias_k",
            "bias_v",
            "out_proj.weight",
            "out_proj.bias",
        ],
    ),
]


@pytest.mark.parametrize(("layer", "shape", "expected"), LAYERS, ids=lambda value: type(value).__name__)
def test_every_default_layer_becomes_sites_of_its_weights(layer, shape, expected):
    layer = to_bayesian_(copy.deepcopy(layer))
    inputs: tuple[Tensor, ...]
    if isinstance(layer, nn.MultiheadAttention):
        x = torch.randn(2, 3, 4)
        inputs = (x, x, x) if shape else (x, x[..., :3], x[..., :3])
    else:
        inputs = (torch.randn(2, *shape),) * (2 if isinstance(layer, nn.Bilinear) else 1)
    assert set(sites(layer, *inputs)) == set(expected)
    assert not list(layer.parameters())


@pytest.mark.parametrize("layer", [nn.Embedding(5, 3), nn.EmbeddingBag(5, 3)])
def test_embeddings_become_sites(layer):
    found = sites(to_bayesian_(layer), torch.tensor([[0, 4]]))
    assert list(found) == ["weight"] and found["weight"]["fn"].event_shape == (5, 3)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.RMSNorm(4)])
def test_norms_stay_deterministic_also_under_a_wildcard(norm):
    net = nn.Sequential(nn.Linear(4, 4), norm)
    to_bayesian_(net, include="*")
    assert set(sites(net, torch.randn(3, 4))) == {"0.weight", "0.bias"}
    assert [name.split(".")[0] for name, _ in net.named_parameters()] == ["1"] * len(list(norm.parameters()))


SELECTIONS = [
    ({}, "0.weight 0.bias 3.weight 3.bias"),
    ({"include": nn.Linear}, "0.weight 0.bias 3.weight 3.bias"),
    ({"include": (nn.LayerNorm, nn.Linear)}, "0.weight 0.bias 1.weight 1.bias 3.weight 3.bias"),
    ({"include": "3.*"}, "3.weight 3.bias"),
    ({"include": ["*.weight"]}, "0.weight 3.weight"),
    ({"include": "1.bias"}, "1.bias"),
    ({"include": lambda name, module, parameter: parameter.dim() == 2}, "0.weight 3.weight"),
    ({"exclude": "*.bias"}, "0.weight 3.weight"),
    ({"exclude": ["0.*", lambda name, module, parameter: name.endswith("bias")]}, "3.weight"),
    ({"include": ["0.*", "3.weight"], "exclude": "0.bias"}, "0.weight 3.weight"),
]


@pytest.mark.parametrize(("selection", "expected"), SELECTIONS)
def test_selection(selection, expected):
    net = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Softplus(), nn.Linear(5, 2))
    assert list(sites(to_bayesian_(net, **selection), torch.randn(3, 4))) == expected.split()


def test_frozen_parameters_stay_as_they_are():
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    net[0].requires_grad_(False)
    assert list(sites(to_bayesian_(net, include="*"), torch.randn(3, 4))) == ["1.weight", "1.bias"]
    assert not net[0].weight.requires_grad


def test_two_calls_may_convert_different_parts():
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    to_bayesian_(net, 0.1, include="0.*")
    to_bayesian_(net, 2.0, include="1.*")
    found = sites(net, torch.randn(3, 4))
    scales = {name: site["fn"].base_dist.scale.flatten()[0].item() for name, site in found.items()}
    assert scales == pytest.approx({"0.weight": 0.1, "0.bias": 0.1, "1.weight": 2.0, "1.bias": 2.0})
