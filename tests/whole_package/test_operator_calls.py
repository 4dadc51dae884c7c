# SPDX-License-Identifier: Apache-2.0
"""How many operators does torch dispatch in a training step, over those of a bare step of Adam on the same network?

Times depend on the machine, these numbers do not. They decide how long a step of a small network takes.
"""

from collections.abc import Callable
from typing import Any

import pyro
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import pyro_dvi as dvi
from tests.models import residual_network

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.15", reason="the numbers are those of torch 2.15; other versions dispatch others"
)


class Dispatched(TorchDispatchMode):
    """Counts what torch dispatches."""

    number = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return function(*args, **(kwargs or {}))


def perceptron(activation: type[nn.Module]) -> nn.Module:
    layers = [nn.Linear(8, 6), activation(), nn.Linear(6, 6), activation(), nn.Linear(6, 3)]
    return nn.Sequential(nn.Flatten(), *layers)


def lenet(activation: type[nn.Module]) -> nn.Module:
    convolutions = [
        nn.Conv2d(1, 2, 3),
        activation(),
        nn.MaxPool2d(2),
        nn.Conv2d(2, 3, 2),
        activation(),
        nn.MaxPool2d(2),
    ]
    layers = [nn.Flatten(), nn.Linear(3, 6), activation(), nn.Linear(6, 6), activation(), nn.Linear(6, 3)]
    return nn.Sequential(*convolutions, *layers)


def residual(activation: type[nn.Module]) -> nn.Module:
    net = residual_network(3)
    return dvi.bayesian.smooth_activations_(net) if activation is nn.Softplus else net


NETS = {"MLP": (perceptron, (8,)), "LeNet": (lenet, (1, 8, 8)), "ResNet": (residual, (3, 16, 16))}


def fifth(step: Callable[[Tensor, Tensor], object], shape: tuple[int, ...]) -> int:
    """Calls of the fifth step, in which no periodic look is due."""
    x, y = torch.randn(4, *shape), torch.arange(4) % 3
    for _ in range(4):
        step(x, y)
    with Dispatched() as calls:
        step(x, y)
    return calls.number


def bare(net: nn.Module) -> Callable[[Tensor, Tensor], object]:
    optimizer = torch.optim.Adam(net.parameters())

    def step(x: Tensor, y: Tensor) -> object:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def adam() -> Any:
    return dvi.optim.Adam(dvi.optim.learning_rates(1e-3))


METHODS: dict[str, tuple[Callable, Callable, Callable]] = {
    "VL": (dvi.MeanFieldGuide, dvi.TaylorELBO, adam),
    "MNVI": (dvi.MultiplicativeNoiseGuide, dvi.MomentPropagationELBO, adam),
    "mean-field moments": (dvi.MeanFieldGuide, dvi.MomentPropagationELBO, adam),
    "VOGN": (dvi.NaturalGradientGuide, dvi.NaturalGradientELBO, lambda: dvi.VOGN({})),
    "IVON": (dvi.NaturalGradientGuide, dvi.NaturalGradientELBO, lambda: dvi.IVON({})),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "net", "most"),
    [
        ("VL", "MLP", 3.5),
        ("VL", "LeNet", 3.1),
        ("VL", "ResNet", 2.35),
        ("MNVI", "MLP", 3.6),
        ("MNVI", "LeNet", 3.4),
        ("MNVI", "ResNet", 2.45),
        ("mean-field moments", "MLP", 3.4),
        ("mean-field moments", "LeNet", 3.35),
        ("mean-field moments", "ResNet", 2.15),
        ("VOGN", "MLP", 2.7),
        ("VOGN", "LeNet", 2.55),
        ("VOGN", "ResNet", 1.95),
        ("IVON", "MLP", 2.3),
        ("IVON", "LeNet", 2.1),
        ("IVON", "ResNet", 1.06),
    ],
)
def test_operator_calls_of_a_step(method, net, most):
    guide, loss, optimizer = METHODS[method]
    make, shape = NETS[net]
    activation = nn.Softplus if method == "VL" else nn.ReLU
    unit = fifth(bare(make(activation)), shape)
    pyro.clear_param_store()
    model = dvi.classifier(dvi.to_bayesian_(make(activation), 1.0), num_data=100)
    svi = SVI(model, guide(model), optimizer(), loss())
    assert fifth(svi.step, shape) <= most * unit
