# SPDX-License-Identifier: Apache-2.0
"""Which functions with kinks lie between the latents and U; the oracle is what each model is made of."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pyro_dvi as dvi
from pyro_dvi.laplace import LaplaceGuide
from pyro_dvi.laplace.mode.diagnosis import kinks
from tests.laplace.problems import guide_at

X = torch.linspace(-4, 4, 24).reshape(6, 4)
IMAGES = torch.linspace(-1, 1, 200).sin().reshape(2, 1, 10, 10)
LOCS = {"w": torch.ones(())}


def through(function: Any) -> Any:
    """A model whose latent goes through ``function`` on its way to the observation."""

    def model(x: Tensor, y: Tensor | None = None) -> Any:
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        f = function(w * x).flatten()
        with pyro.plate("data", len(f)):
            return pyro.sample("y", dist.Normal(f, 1.0), obs=torch.zeros(len(f)) if y is None else y)

    return model


def found(model: Any, x: Tensor = X, subset: Any = None) -> tuple[str, ...]:
    return kinks(guide_at(model, (x,), LOCS).energy([(x,)], subset=subset))


KINKED = {
    "abs": torch.abs,
    "elu": F.selu,
    "hardshrink": F.hardshrink,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardtanh": lambda x: F.relu6(x),
    "leaky_relu": lambda x: F.leaky_relu(x + 0, 0.1, inplace=True),
    "maximum": lambda x: torch.maximum(x, -x),
    "fmin": lambda x: torch.fmin(x, x.new_zeros(())),
    "minimum": lambda x: torch.minimum(x, x.new_zeros(())),
    "prelu": lambda x: F.prelu(x, x.new_tensor([0.2])),
    "relu": lambda x: F.relu(x + 0, inplace=True),
    "rrelu": lambda x: F.rrelu(x),
    "softshrink": F.softshrink,
    "threshold": lambda x: F.threshold(x, 0.5, 0.0),
}
SMOOTH = [
    torch.tanh,
    F.softplus,
    F.gelu,
    F.silu,
    F.mish,
    F.elu,
    F.celu,
    torch.sigmoid,
    lambda x: x.softmax(-1),
]


@pytest.mark.parametrize("name", KINKED)
def test_functions_with_kinks_are_named(name):
    assert found(through(KINKED[name])) == (name,)


@pytest.mark.parametrize(
    ("name", "clamp"),
    [
        ("clamp", lambda x: x.clamp(-1, 1)),
        ("clamp", lambda x: x.clamp(min=0.5)),
        ("clamp", lambda x: x.clamp(max=x.new_ones(4))),
        ("clamp_min", lambda x: x.clamp_min(0)),
        ("clamp_max", lambda x: x.clamp_max(1)),
    ],
)
def test_clamps_are_named(name, clamp):
    assert found(through(clamp)) == (name,)


def test_smooth_functions_are_not():
    assert [found(through(function)) for function in SMOOTH] == [()] * len(SMOOTH)


def test_a_kink_out_of_reach_is_none():
    assert found(through(lambda x: F.relu(x + 9).abs().clamp(1e-6, 1e6))) == ()

    def model(x: Tensor) -> None:  # probabilities are clamped before their logarithm
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", x.numel()):
            pyro.sample("y", dist.Bernoulli(torch.sigmoid(w * x.flatten())), obs=torch.ones(x.numel()))

    assert found(model) == ()


def test_ties_do_not_count():
    assert found(through(lambda x: F.max_pool2d(x, 2)), IMAGES) == ()


def test_only_the_way_from_latents_that_vary_counts():
    features = nn.Linear(4, 9)

    def model(x: Tensor, y: Tensor | None = None) -> None:
        scale = pyro.param("scale", torch.ones(4))  # trained, but no latent
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        v = pyro.sample("v", dist.Normal(0.0, 1.0))
        pyro.sample("lasso", dist.Laplace(0.0, 1.0).expand([2]).to_event(1))
        f = w * F.relu(features(scale * x)).sum(1) + F.leaky_relu(v * x).sum(1)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(f, 1.0), obs=torch.zeros(len(x)))

    guide = guide_at(model, (X,), {**LOCS, "lasso": torch.tensor([1.0, -1.0])})
    for subset, names in (
        ("w", ()),
        ("v", ("leaky_relu",)),
        ("lasso", ("abs in a prior",)),
        (None, ("abs in a prior", "leaky_relu")),
    ):
        assert kinks(guide.energy([(X,)], subset=subset)) == names


def test_a_convolutional_network():
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU6(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(48, 2)
    )
    guide = LaplaceGuide(dvi.classifier(dvi.to_bayesian_(net), num_data=2))
    batches = [(IMAGES, torch.tensor([0, 1]))]
    assert kinks(guide.energy(batches)) == ("hardtanh",)
    assert kinks(guide.energy(batches, subset="*5*")) == ()
    dvi.bayesian.smooth_activations_(net)
    guide = LaplaceGuide(dvi.classifier(net, num_data=2))
    assert kinks(guide.energy(batches)) == ()
