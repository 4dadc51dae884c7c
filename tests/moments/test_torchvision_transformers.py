# SPDX-License-Identifier: Apache-2.0
"""Vision transformers, unmodified: torchvision's result in the certain limit, and the deviation of a small one."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.bilinear import MultiplicativeMoments

models = pytest.importorskip("torchvision.models")

NETS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "vit_b_16": (lambda: models.vit_b_16(image_size=32, num_classes=5), 32),
    "swin_t": (lambda: models.swin_t(num_classes=5), 64),
    "swin_v2_t": (lambda: models.swin_v2_t(num_classes=5), 64),
    "small": (lambda: models.VisionTransformer(16, 4, 2, 4, 32, 64, num_classes=5), 16),
}


def built(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    net = NETS[name][0]().eval()
    if isinstance(net, models.VisionTransformer):
        nn.init.normal_(net.heads.head.weight, std=0.1)  # zero by default
    return net, torch.rand(2, 3, NETS[name][1], NETS[name][1])


def uncertain(net: nn.Module, alpha: float) -> nn.Module:
    """Give the matrices and kernels multiplicative noise, and everything else none."""
    for name, parameter in list(net.named_parameters()):
        path, _, last = name.rpartition(".")
        owner = net.get_submodule(path)
        del owner._parameters[last]
        w = parameter.detach()
        noise = torch.full((1,) * w.dim(), alpha if w.dim() > 1 else 0.0, dtype=w.dtype)
        object.__setattr__(owner, last, MultiplicativeMoments(w, noise))
    return net


LONG = {"vit_b_16": pytest.mark.soak, "swin_v2_t": pytest.mark.slow}


@pytest.mark.parametrize("name", [pytest.param(name, marks=LONG.get(name, ())) for name in NETS])
def test_certain_limit(name: str) -> None:
    net, x = built(name)
    # Dropout of whole paths is drawn: left out, so that both do the same.
    for module in net.modules():
        if type(module).__name__ == "StochasticDepth":
            object.__setattr__(module, "p", 0.0)
    with torch.no_grad():
        expected = [net.train(training)(x) for training in (False, True)]
        uncertain(net, 0.0)
        for training in (False, True):
            y = net.train(training)(x)
            torch.testing.assert_close(y.loc, expected[training], rtol=1e-3, atol=1e-4)
            assert y.variance.max() < 1e-6


@pytest.mark.parametrize("name", ["small", pytest.param("swin_t", marks=pytest.mark.slow)])
def test_gradients_reach_the_noise(name: str) -> None:
    net, x = built(name)
    alpha = torch.tensor(1e-3, requires_grad=True)
    w = net.conv_proj.weight.detach() if hasattr(net, "conv_proj") else net.features[0][0].weight.detach()
    uncertain(net, 1e-3)
    owner = net if hasattr(net, "conv_proj") else net.features[0][0]
    object.__setattr__(
        *((owner.conv_proj,) if owner is net else (owner,)), "weight", GaussianMoments(w, alpha * w.square())
    )
    net(x).variance.sum().backward()
    assert alpha.grad.isfinite() and alpha.grad.abs() > 0


def test_deviation_of_a_small_vision_transformer_against_samples_of_its_weights() -> None:
    """Two layers; what the tokens share through the weights is dropped and costs part of the deviation."""
    net, x = built("small")
    alpha, samples = 0.01, 400
    weights = {k: v.detach() for k, v in net.named_parameters()}
    with torch.no_grad():
        drawn = [
            torch.func.functional_call(
                net,
                {
                    k: v * (1 + alpha**0.5 * torch.randn_like(v)) if v.dim() > 1 else v
                    for k, v in weights.items()
                },
                (x,),
            )
            for _ in range(samples)
        ]
        y = uncertain(net, alpha)(x)
    values = torch.stack(drawn)
    assert 0.75 < (y.variance.sqrt() / values.std(0)).median() < 1
    # The mean of the samples has an error of 0.05 deviations.
    assert ((y.loc - values.mean(0)) / values.std(0)).square().mean().sqrt() < 0.15
