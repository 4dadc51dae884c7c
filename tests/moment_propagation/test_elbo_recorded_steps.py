# SPDX-License-Identifier: Apache-2.0
"""While a step is recorded it reads no value, and it computes the same bits as the step that may read."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro.infer import SVI
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import pyro_dvi as dvi
from pyro_dvi.core.recorder import Recorder
from pyro_dvi.moment_propagation import AllOutputs


class NoReads(TorchDispatchMode):
    """Refuses operators whose result for Python follows from values; counts the operators."""

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        self.follows = {self.memory(value) for value in inputs}
        self.alive: list[Any] = [inputs]  # so that no memory is used twice
        self.calls: Counter[str] = Counter()

    @staticmethod
    def memory(tensor: Tensor) -> int:
        return tensor.untyped_storage()._cdata

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        name = func._schema.name.removeprefix("aten::")
        self.calls[name] += 1
        if any(self.memory(value) in self.follows for value in given):
            masks = name.startswith("index") and any(v.dtype in (torch.bool, torch.uint8) for v in given[1:])
            shaped = torch.Tag.dynamic_output_shape in func.tags and not name.startswith("index")
            if torch.Tag.data_dependent_output in func.tags or masks or shaped:
                raise AssertionError(f"{name} looks at values")
            self.follows |= {self.memory(v) for v in given if func._schema.is_mutable}
            result = func(*args, **(kwargs or {}))
            self.follows |= {self.memory(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        else:
            result = func(*args, **(kwargs or {}))
        self.alive += [given, result]
        return result


class Model(nn.Module):
    """A network with a likelihood of its outputs."""

    def __init__(self, net: nn.Module, likelihood: Callable[..., Any]) -> None:
        super().__init__()
        self.net, self.likelihood = dvi.to_bayesian_(net, prior_scale=1.0), likelihood

    def forward(self, x: Tensor, y: Tensor | None = None) -> None:
        fn = self.likelihood(self.net(x))
        with pyro.plate("data", 100, subsample_size=len(x)):
            pyro.sample("y", fn, obs=y)


def perceptron(*middle: nn.Module, width: int = 16, outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), *middle, nn.Linear(width, outputs))


def convolutional(*middle: nn.Module) -> nn.Module:
    head = [nn.Flatten(), nn.LazyLinear(3)]
    net = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 4, 3, padding=2), *middle, *head)
    net(torch.zeros(2, 4))
    return net


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(2, 1, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, 2, 2)
        result: Tensor = self.head(self.attention(x, x, x, need_weights=False)[0].flatten(1))
        return result


class Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.layer, self.head = kind(2, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.layer(x.reshape(-1, 2, 2))[0][:, -1])
        return result


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "leaky relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "gelu by tanh": lambda: nn.GELU("tanh"),
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "hardtanh": nn.Hardtanh,
    "softmax": lambda: nn.Softmax(-1),
    "layer norm": lambda: nn.LayerNorm(16),
    "batch norm": lambda: nn.BatchNorm1d(16),
    "dropout": lambda: nn.Dropout(0.3),
}
NETS: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda kind=kind: perceptron(kind(), nn.Linear(16, 16), kind()) for name, kind in ACTIVATIONS.items()},
    "max pooling": lambda: convolutional(nn.ReLU(), nn.MaxPool2d(2)),
    "average pooling": lambda: convolutional(nn.Tanh(), nn.AvgPool2d(2)),
    "adaptive pooling": lambda: convolutional(nn.SiLU(), nn.AdaptiveAvgPool2d(3)),
    "batch norm of images": lambda: convolutional(nn.BatchNorm2d(4), nn.ReLU()),
    "batch norm in eval mode": lambda: perceptron(nn.BatchNorm1d(16).eval(), nn.ReLU()),
    "attention": Attention,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "rnn": lambda: Recurrent(nn.RNN),
    "several blocks": lambda: perceptron(nn.Tanh(), width=1100),
}  # fmt: skip
CLASSES = torch.arange(32) % 3
NUMBERS = torch.linspace(-1, 1, 96).reshape(32, 3)
COUNTS = (torch.arange(96) % 4.0).reshape(32, 3)
LIKELIHOODS: dict[str, tuple[Callable[[Any], Any], Tensor]] = {
    "categorical": (lambda f: dist.Categorical(logits=f), CLASSES),
    "softmax": (lambda f: dist.Categorical(probs=f.softmax(-1)), CLASSES),
    "one hot": (lambda f: dist.OneHotCategorical(logits=f), F.one_hot(CLASSES).float()),
    "bernoulli": (lambda f: dist.Bernoulli(logits=f).to_event(1), NUMBERS.gt(0).float()),
    "normal": (lambda f: dist.Normal(f, 0.5).to_event(1), NUMBERS),
    "heteroscedastic": (lambda f: dist.Normal(f[:, 0], (0.5 * f[:, 1]).exp()), NUMBERS[:, 0]),
    "softplus scale": (lambda f: dist.Normal(f[:, 0], F.softplus(f[:, 1]) + 0.1), NUMBERS[:, 0]),
    "root of a variance": (lambda f: dist.Normal(f[:, 0], (F.softplus(f[:, 1]) + 0.1).sqrt()), NUMBERS[:, 0]),
    "learned noise": (
        lambda f: dist.Normal(f, pyro.sample("noise", dist.LogNormal(0.0, 1.0))).to_event(1),
        NUMBERS,
    ),
    "quotient": (lambda f: dist.Normal(1 / (100 + f), 0.1).to_event(1), NUMBERS),
    "poisson": (lambda f: dist.Poisson(f.exp()).to_event(1), COUNTS),
    "softplus rate": (lambda f: dist.Poisson(F.softplus(f)).to_event(1), COUNTS),
    "student": (lambda f: dist.StudentT(4.0, f, 0.5).to_event(1), NUMBERS),
    "laplace": (lambda f: dist.Laplace(f, 0.5).to_event(1), NUMBERS),
    "negative binomial": (lambda f: dist.NegativeBinomial(5.0, logits=f).to_event(1), COUNTS),
    "gamma": (lambda f: dist.Gamma(F.softplus(f), 1.0).to_event(1), NUMBERS + 2),
    "beta": (lambda f: dist.Beta(f[:, 0].exp(), F.softplus(f[:, 1])), NUMBERS[:, 0] / 4 + 0.5),
    "multinomial": (lambda f: dist.Multinomial(6, logits=f), torch.tensor([1.0, 2.0, 3.0]).expand(32, 3)),
}

GUIDES = {
    "mean-field": dvi.MeanFieldGuide,
    "multiplicative noise": dvi.MultiplicativeNoiseGuide,
    "last layer": lambda model: dvi.LastLayerGuide(model, "2"),
    "dependent last layer": lambda model: dvi.LastLayerGuide(model, "2", covariance=AllOutputs()),
}


def gradients(step: Callable[[], Tensor], parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return loss, gradients and random state of one step, which leaves the parameters alone."""
    loss = step()
    loss.backward()
    found = {name: torch.zeros(()) if p.grad is None else p.grad.clone() for name, p in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    return {"loss": loss.detach(), "random state": torch.get_rng_state(), **found}


def compare(model: nn.Module, guide: Any, data: tuple[Tensor, ...]) -> NoReads:
    """Train for four steps, then take the fifth twice from the same state, once as if it were recorded."""
    elbo = dvi.MomentPropagationELBO()
    svi = SVI(model, guide, dvi.optim.Adam({"lr": 0.01}), elbo)
    for _ in range(4):
        svi.step(*data)
    store = pyro.get_param_store()
    parameters = {name: store[name].unconstrained() for name in store}
    buffers = {name: b.clone() for name, b in model.named_buffers()}

    def step() -> Tensor:
        return elbo.differentiable_loss(model, guide, *data)

    with torch.random.fork_rng(devices=[]):
        ordinary = {**gradients(step, parameters), **{n: b.clone() for n, b in model.named_buffers()}}
    for name, buffer in model.named_buffers():
        buffer.data.copy_(buffers[name])
    elbo.step -= 1
    watch = NoReads([*parameters.values(), *data, *model.buffers()])
    with pyro.validation_enabled(False), Recorder([]), watch:
        recorded = gradients(step, parameters)
    recorded |= dict(model.named_buffers())
    for name, value in ordinary.items():
        assert torch.equal(value, recorded[name]), name
    assert any(bool(g.any()) for n, g in recorded.items() if n in parameters)
    return watch


@pytest.mark.parametrize(
    ("guide", "dtype"), [("mean-field", torch.float64), ("multiplicative noise", torch.float32)]
)
@pytest.mark.parametrize(
    "net", [pytest.param(net, marks=[pytest.mark.slow] if k % 6 else []) for k, net in enumerate(NETS)]
)
def test_networks(net, guide, dtype):
    torch.set_default_dtype(dtype)
    x = 2 * torch.randn(32, 4)
    model = Model(NETS[net](), LIKELIHOODS["categorical"][0])
    compare(model, GUIDES[guide](model), (x, CLASSES))


WITH_COVARIANCES = ("categorical", "softmax", "one hot", "normal", "heteroscedastic", "multinomial")


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("likelihood", "guide"),
    [(k, g) for k in LIKELIHOODS for g in GUIDES if g != "dependent last layer" or k in WITH_COVARIANCES],
)
def test_likelihoods(likelihood, guide):
    make, y = LIKELIHOODS[likelihood]
    model = Model(perceptron(nn.Tanh()), make)
    compare(model, GUIDES[guide](model), (torch.randn(32, 4), y))


@pytest.mark.every(3)
@pytest.mark.parametrize("net", ["tanh", "elu", "gelu", "adaptive pooling"])
def test_constants_are_there_before_the_step(net):
    """But for the quantiles at fresh points of the log-normaliser, which follow from random numbers."""
    model = Model(NETS[net](), LIKELIHOODS["categorical"][0])
    calls = compare(model, dvi.MeanFieldGuide(model), (torch.randn(32, 4), CLASSES)).calls
    assert calls["erfinv"] == 1
    assert not {"linspace", "arange", "eye", "full", "promote_types"} & calls.keys()
    assert calls["lift_fresh"] <= 3  # one for the weight of the divergence, others in Pyro
