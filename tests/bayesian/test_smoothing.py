# SPDX-License-Identifier: Apache-2.0
"""smooth_activations_: every kink gets a second derivative, values stay close, shared modules stay shared."""

import pytest
import torch
import torch.nn.functional as F
from pyro.nn.module import to_pyro_module_
from torch import nn

from pyro_dvi.bayesian import smooth_activations_, to_bayesian_
from pyro_dvi.bayesian.smoothing import SMOOTH, RoundedCorners

# old activation, new class, largest distance between the two functions
REPLACED = [
    (nn.ReLU(), nn.Softplus, 0.7),
    (nn.ReLU(inplace=True), nn.Softplus, 0.7),
    (nn.ReLU6(), RoundedCorners, 0.7),
    (nn.Hardtanh(), RoundedCorners, 0.24),
    (nn.Hardtanh(-3.0, 0.5), RoundedCorners, 0.41),
    (nn.LeakyReLU(0.2), RoundedCorners, 0.56),
    (nn.Hardswish(), nn.SiLU, 0.15),
    (nn.Hardsigmoid(), nn.Sigmoid, 0.07),
]


@pytest.mark.parametrize(("old", "new", "distance"), REPLACED)
def test_each_replacement_is_close_and_smooth(old, new, distance):
    net = smooth_activations_(nn.Sequential(old))
    assert type(net[0]) is new
    x = torch.linspace(-15, 15, 3001, dtype=torch.float64)
    assert (net(x) - old(x.clone())).abs().max() < distance
    points = torch.linspace(-2.9, 2.9, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(net, points)
    (slope,) = torch.autograd.grad(net(points).sum(), points, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), points)
    assert (curvature.abs() > 1e-4).all()


@pytest.mark.parametrize("old", [nn.GELU(), nn.Tanh(), nn.ELU(), nn.Softplus(), nn.Sigmoid(), nn.Identity()])
def test_smooth_modules_stay(old):
    net = nn.Sequential(old, nn.Softplus())
    assert smooth_activations_(net)[0] is old


def test_a_shared_activation_stays_shared():
    relu = nn.ReLU()
    net = nn.ModuleDict({"a": nn.Sequential(relu, nn.Linear(2, 2)), "b": relu})
    smooth_activations_(net)
    assert net["b"] is net["a"][0] and isinstance(net["b"], nn.Softplus)


@pytest.mark.parametrize("replacement", [nn.GELU, lambda old: nn.GELU()])
def test_mapping(replacement):
    net = smooth_activations_(nn.Sequential(nn.ReLU(), nn.LeakyReLU()), {**SMOOTH, nn.ReLU: replacement})
    assert isinstance(net[0], nn.GELU) and isinstance(net[1], RoundedCorners)


def test_a_bare_activation_is_returned_as_its_replacement():
    assert isinstance(smooth_activations_(nn.ReLU()), nn.Softplus)


def test_mode_is_kept_and_converted_networks_work():
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).eval()
    smooth_activations_(to_bayesian_(net))
    assert isinstance(net[1], nn.Softplus) and not net[1].training
    net(torch.zeros(1, 2))


@pytest.mark.parametrize("activation", ["relu", F.relu, torch.relu, nn.ReLU()])
def test_transformer_layers_keep_their_function_as_an_attribute(activation):
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, activation=activation)
    smooth_activations_(layer)
    x = torch.randn(2, 3, 4)
    trained = layer(x)
    layer.eval()
    with torch.no_grad():  # torch takes a fused path with a relu of its own unless it is told
        assert torch.allclose(layer(x), trained, atol=1e-6)


@pytest.mark.parametrize("convert", [False, True], ids=["plain", "converted"])
@pytest.mark.parametrize("activation", ["relu", nn.ReLU()])
def test_transformer_encoders_evaluate_padded_batches(activation, convert):
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, activation=activation)
    net = nn.Sequential(nn.TransformerEncoder(layer, 2))
    if convert:
        to_pyro_module_(net)
    encoder = smooth_activations_(net)[0]
    x = torch.randn(2, 3, 4)
    padding = torch.tensor([[False, False, False], [False, False, True]])
    trained = encoder(x, src_key_padding_mask=padding)
    encoder.eval()
    with torch.no_grad():  # torch packs the batch into a nested tensor, without softplus, unless it is told
        evaluated = encoder(x, src_key_padding_mask=padding)
    assert torch.allclose(evaluated[~padding], trained[~padding], atol=1e-6)


def test_transformer_encoders_without_a_change_keep_their_fast_path():
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, activation="gelu")
    net = nn.ModuleList([nn.TransformerEncoder(layer, 1), nn.ReLU()])
    assert smooth_activations_(net)[0].use_nested_tensor


def test_resnet_of_torchvision_has_no_kink_left_but_pooling():
    torchvision = pytest.importorskip("torchvision")
    for name in ("resnet18", "mobilenet_v2", "mobilenet_v3_small"):
        with torch.device("meta"):  # no weights are needed
            net = smooth_activations_(torchvision.models.get_model(name))
        assert not any(isinstance(module, tuple(SMOOTH)) for module in net.modules())
