# SPDX-License-Identifier: Apache-2.0
"""Torchvision's networks, unmodified, with uncertain weights."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.bilinear import MultiplicativeMoments

torchvision = pytest.importorskip("torchvision")

# name -> image size
SMALL = {"resnet18": 32, "squeezenet1_0": 32, "shufflenet_v2_x0_5": 32}
LARGE = {
    "resnet50": 32,
    "vgg11_bn": 32,
    "densenet121": 32,
    "googlenet": 64,
    "mobilenet_v2": 32,
    "mobilenet_v3_small": 32,
    "efficientnet_b0": 32,
    "convnext_tiny": 32,
}
SOAK = {"resnet50", "vgg11_bn", "mobilenet_v2"}  # made of what the others are made of
NETWORKS = [
    *SMALL,
    *(pytest.param(name, marks=pytest.mark.soak if name in SOAK else pytest.mark.slow) for name in LARGE),
]


def multiplicative(weight: Tensor) -> GaussianMoments:
    """Noise of a weight for each of its inputs."""
    return MultiplicativeMoments(weight, torch.full((1, weight.shape[1], *[1] * (weight.dim() - 2)), 1e-4))


def mean_field(weight: Tensor) -> GaussianMoments:
    return GaussianMoments(weight, 1e-4 * weight.square().mean().expand_as(weight))


def certain(weight: Tensor) -> GaussianMoments:
    return GaussianMoments(weight, torch.zeros_like(weight))


def with_moments(net: nn.Module, moments: Callable[[Tensor], GaussianMoments]) -> nn.Module:
    """Replace the weights of linear and convolutional layers of a copy by moments.

    A module takes no attribute in place of a parameter, but a plain one after the parameter is gone. The copy has
    buffers of its own; parameters are shared, since nothing here changes their values.
    """
    net = copy.deepcopy(net, {id(parameter): parameter for parameter in net.parameters()})
    for module in net.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            weight = module.weight.detach()
            del module.weight
            vars(module)["weight"] = moments(weight)
    return net


def images(size: int) -> Tensor:
    return torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=NETWORKS)
def network(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    """A network that its tests copy, and images."""
    name = request.param
    torch.manual_seed(0)
    make = getattr(torchvision.models, name)
    options = {"aux_logits": False, "init_weights": False} if name == "googlenet" else {}
    net = make(num_classes=10, **options)
    for module in net.modules():
        if hasattr(module, "p") or type(module).__name__ == "StochasticDepth":
            module.p = 0.0  # layers dropped at random would drop differently in two runs
    return net, images({**SMALL, **LARGE}[name])


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_moments_pass_through(network: tuple[nn.Module, Tensor], training: bool) -> None:
    net, x = network
    for moments in (multiplicative, mean_field):
        with torch.no_grad():
            y = with_moments(net, moments).train(training)(x)
        assert isinstance(y, GaussianMoments)
        assert y.shape == (4, 10)
        assert y.loc.isfinite().all()
        assert y.variance.isfinite().all()
        assert (y.variance >= 0).all()  # 0 where a network ends in rectifiers that are shut
        assert y.variance.max() > 0


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_certain_weights_give_the_plain_network(network: tuple[nn.Module, Tensor], training: bool) -> None:
    net, x = network
    net, x = copy.deepcopy(net).double().train(training), x.double()
    with torch.no_grad():
        y = with_moments(net, certain)(x)
        plain = net(x)
    error = (
        torch.finfo(x.dtype).eps ** 0.5
    )  # rectifiers see a variance of at least the squared rounding error
    torch.testing.assert_close(y.loc, plain, rtol=error, atol=error)
    assert y.variance.max() <= error * (1 + plain.square().max())
