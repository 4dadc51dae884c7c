# SPDX-License-Identifier: Apache-2.0
"""What the objective of natural gradients measures, against a loop over the examples of Pyro models."""

import warnings
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor, nn

from pyro_dvi.bayesian import classifier, to_bayesian_
from pyro_dvi.errors import DviWarning, GuideError, ModelError
from pyro_dvi.natural_gradients.natural_elbo import NaturalGradientELBO
from pyro_dvi.natural_gradients.precision_guide import NaturalGradientGuide
from pyro_dvi.natural_gradients.updates import VOGN
from tests.models import residual_network
from tests.objectives.loops import M, N, assert_equal, looped, minibatch, squares_at_mean, weights, x_and_y

pytestmark = pytest.mark.usefixtures("double")


# Models ---------------------------------------------------------------------------------------------------------


def subsampled(x, y):
    h = torch.tanh(x @ weights((3, 4), "v"))
    mean = (h @ weights((4,))) + weights((), "b")
    with minibatch():
        pyro.sample("y", dist.Normal(mean, 0.5), obs=y)


def masked(x, y):
    mean = x @ weights((3,))
    with minibatch(), poutine.mask(mask=torch.arange(M) % 3 > 0):
        pyro.sample("y", dist.Normal(mean, 0.5), obs=y)


def two_sites(x, y):
    """Heads on a shared layer, with plates of different sizes."""
    v, w = weights((3, 4), "v"), weights((4,))
    with minibatch():
        pyro.sample("y", dist.Normal(torch.tanh(x @ v) @ w, 0.5), obs=y)
    with minibatch("others", 100, 4):
        pyro.sample("z", dist.Poisson(torch.exp(torch.tanh(x[:4] @ v).sum(1))), obs=torch.arange(4.0))


def a_factor(x, y):
    w = weights((3,))
    with minibatch():
        pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)
    pyro.factor("more", -(w**4).sum())


def weights_of_examples(x, y):
    mean = torch.tanh(x @ weights((3,)))
    with minibatch(), poutine.scale(scale=torch.linspace(0.5, 2, M)):
        pyro.sample("y", dist.Normal(mean, 0.5), obs=y)


def two_batch_dimensions(x, y):
    mean = torch.tanh(x @ weights((3, 2)))
    with pyro.plate("outputs", 2, dim=-1), pyro.plate("data", N, subsample=torch.arange(M), dim=-2):
        pyro.sample("y", dist.Normal(mean, 0.5), obs=torch.stack([y, -y], -1))


def data_in_the_last_dimension(x, y):
    mean = torch.tanh(x @ weights((3, 2))).T
    with pyro.plate("outputs", 2, dim=-2), pyro.plate("data", N, subsample=torch.arange(M), dim=-1):
        pyro.sample("y", dist.Normal(mean, 0.5), obs=torch.stack([y, -y]))


def as_many_outputs_as_examples(x, y):
    mean = torch.tanh(x @ weights((3, M)))
    with pyro.plate("outputs", M, dim=-2), pyro.plate("data", M, dim=-1):
        pyro.sample("y", dist.Normal(mean.T, 0.5), obs=torch.outer(y, y))


def local_latents(x, y):
    w = weights((3,))
    with pyro.plate("data", M):
        shift = pyro.sample("shift", dist.Normal(0.0, 1.0))
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        pyro.sample("y", dist.Normal(torch.tanh(x @ w + shift) + (slope * x).sum(-1), 0.5), obs=y)


def local_latents_of_many_outputs(x, y):
    with pyro.plate("data", M, dim=-2):
        shift = pyro.sample("shift", dist.Normal(0.0, 1.0))
        with pyro.plate("outputs", 2, dim=-1):
            pyro.sample("y", dist.Normal(torch.tanh(shift), 0.5), obs=torch.stack([y, -y], -1))


def random_walk(x, y):
    """Latents in the plate of the observations, of which each reaches all later ones."""
    with pyro.plate("data", M):
        step = pyro.sample("step", dist.Normal(0.0, 1.0))
        shift = pyro.sample("shift", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(torch.tanh(step.cumsum(0) + shift), 0.5), obs=y)


def groups(x, y):
    """Latents of three groups: each belongs to several examples."""
    with pyro.plate("groups", 3):
        level = pyro.sample("level", dist.Normal(0.0, 1.0))
    with minibatch():
        pyro.sample("y", dist.Normal(torch.tanh(level[torch.arange(M) % 3]), 0.5), obs=y)


def one_observation(x, y):
    pyro.sample("y", dist.Normal(x @ weights((3,)), 0.5).to_event(1), obs=y)


def unscaled_features(x, y):
    """As many rows of weights as examples: a non-centred prior."""
    centre, offset = weights((3,), "centre"), weights((M, 3), "offset")
    with minibatch():
        pyro.sample("y", dist.Normal(torch.tanh(x @ (centre + offset).T).sum(1), 0.5), obs=y)


def unused(x, y):
    weights((2,), "idle").sum()
    mean = x @ weights((3,))
    with minibatch():
        pyro.sample("y", dist.Normal(mean, 0.5), obs=y)


MODELS = [
    subsampled,
    masked,
    two_sites,
    a_factor,
    weights_of_examples,
    two_batch_dimensions,
    data_in_the_last_dimension,
    as_many_outputs_as_examples,
    local_latents,
    local_latents_of_many_outputs,
    random_walk,
    groups,
    one_observation,
    unscaled_features,
    unused,
]


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_squares_of_a_model_are_those_of_a_loop(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DviWarning)
        assert_equal(*squares_at_mean(model, *x_and_y()))


@pytest.mark.parametrize("model", [subsampled, two_sites], ids=lambda m: m.__name__)
def test_squares_are_averaged_over_draws(model):
    x, y = x_and_y()
    guide = NaturalGradientGuide(model)
    guide.initialize(x, y)
    elbo = NaturalGradientELBO(num_particles=2)
    torch.manual_seed(4)
    draws = [poutine.trace(guide).get_trace(x, y) for _ in range(2)]
    values = [{n: s["value"].detach() for n, s in t.nodes.items() if s["type"] == "sample"} for t in draws]
    torch.manual_seed(4)
    elbo.loss_and_grads(model, guide, x, y)
    for name in values[0]:
        expected = sum(looped(model, v, x, y)[name] for v in values) / 2
        torch.testing.assert_close(guide.precision_parameter(name).grad, expected, rtol=1e-9, atol=1e-10)


def test_a_loss_is_differentiated_once():
    guide = NaturalGradientGuide(subsampled)
    guide.initialize(*x_and_y())
    loss = NaturalGradientELBO().differentiable_loss(subsampled, guide, *x_and_y())
    loss.backward(retain_graph=True)
    with pytest.raises(GuideError, match="first backward pass"):
        loss.backward()


def test_a_latent_that_reaches_no_observation_becomes_its_prior():
    x, y = x_and_y()
    guide = NaturalGradientGuide(unused)
    options = {"lr": 0.1, "max_step": 0.03, "initial_curvature": 0.1, "betas": (0.9, 0.5)}
    svi = SVI(unused, guide, VOGN(options), NaturalGradientELBO())
    for _ in range(100):
        svi.step(x, y)
    torch.testing.assert_close(guide.locs.idle.detach(), torch.zeros(2), atol=0.05, rtol=0)
    torch.testing.assert_close(guide.precisions.idle.detach(), torch.ones(2))


def test_heads_of_other_sites_cost_nothing():
    def model(x, y):
        shared, first, second = weights((3, 4), "shared"), weights((4,), "first"), weights((4,), "second")
        h = torch.tanh(x @ shared)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(h @ first, 0.5), obs=y)
        with pyro.plate("others", 100, subsample=torch.arange(40)):
            pyro.sample("z", dist.Normal(torch.tanh(x[:40] @ shared) @ second, 0.5), obs=y[:40])

    x = torch.randn(50, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no passes for examples
        assert_equal(*squares_at_mean(model, x, x.sum(1)))


def test_local_latents_of_a_subsampled_plate_are_refused():
    def model(x, y):
        with pyro.plate("data", N, subsample=torch.arange(M)):
            shift = pyro.sample("shift", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(shift, 0.5), obs=y)

    x, y = x_and_y()
    guide = NaturalGradientGuide(model)
    with pytest.raises(ModelError, match=r"'shift' is scaled or masked.*subsampled"):
        NaturalGradientELBO().loss_and_grads(model, guide, x, y)


def test_many_passes_are_announced_once():
    x, y = torch.randn(50, 12), torch.randn(50)

    def model(x, y):
        w, v = weights((12,)), weights((12,), "v")
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(torch.tensordot(x, w, 1) + x @ v.sin(), 0.5), obs=y)

    guide = NaturalGradientGuide(model)
    guide.initialize(x, y)
    elbo = NaturalGradientELBO()
    with pytest.warns(DviWarning) as caught:
        elbo.loss_and_grads(model, guide, x, y)
    (message,) = [str(w.message) for w in caught]
    assert message.startswith("observed site 'y': ") and "50 backward passes in each step" in message
    assert "has no rule for per-example gradients with these arguments" in message
    guide.natural_step.drop()
    elbo.loss_and_grads(model, guide, x, y)  # a second warning would be an error


def test_a_transformer_needs_no_backward_pass_for_each_example():
    """A warning of slow layers would be an error here; 40 examples would be 40 passes."""
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(4, 2, 5, 0.0, batch_first=True) for _ in range(2)]
    net = to_bayesian_(nn.Sequential(*layers, nn.Flatten(), nn.Linear(12, 2)))
    model, x = classifier(net, num_data=40), torch.randn(40, 3, 4)
    assert_equal(*squares_at_mean(model, x, torch.arange(40) % 2))


def test_many_columns_are_announced_once():
    def model(x, y, event_dim=0):
        mean = torch.nn.functional.linear(x, weights((40, 3)))
        with pyro.plate("data", len(x), dim=-1 if event_dim else -2):
            pyro.sample("pixels", dist.Normal(mean, 0.5).to_event(event_dim), obs=mean.detach() + 1)

    x, y = x_and_y()
    guide = NaturalGradientGuide(model)
    guide.initialize(x, y)
    elbo = NaturalGradientELBO()
    with pytest.warns(DviWarning, match=r"'pixels'.*40 backward passes.*\.to_event\(1\)"):
        elbo.loss_and_grads(model, guide, x, y)
    guide.natural_step.drop()
    elbo.loss_and_grads(model, guide, x, y)  # a second warning would be an error
    guide.natural_step.drop()
    NaturalGradientELBO().loss_and_grads(model, guide, x, y, 1)


# Networks -------------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 2, batch_first=True), nn.Linear(2, 2)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 3)

    def forward(self, x):
        return torch.nn.functional.linear(self.table(x).mean(1), self.table.weight)[:, :2]


class Normalised(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 4), nn.LayerNorm(4), nn.SiLU(), nn.Linear(4, 2))


class Attention(nn.Module):
    def __init__(self, batch_first: bool):
        super().__init__()
        self.batch_first = batch_first
        self.layer = nn.TransformerEncoderLayer(4, 2, 5, 0.0, batch_first=batch_first)
        self.embed, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        h = self.embed(x)
        h = self.layer(h) if self.batch_first else self.layer(h.transpose(0, 1)).transpose(0, 1)
        return self.head(h.mean(1))


NETS = {
    "LSTM": (Recurrent, torch.randn(M, 4, 3).double()),
    "tied weights": (Tied, torch.randint(5, (M, 4))),
    "layer norm": (Normalised, torch.randn(M, 3).double()),
    "transformer": (lambda: Attention(True), torch.randn(M, 4, 3).double()),
    "transformer, as many positions as examples": (lambda: Attention(False), torch.randn(M, M, 3).double()),
}


@pytest.mark.parametrize("name", NETS)
def test_squares_of_a_network_are_those_of_a_loop(name):
    make, x = NETS[name]
    model = classifier(to_bayesian_(make(), prior_scale=1.0), num_data=N)
    assert_equal(*squares_at_mean(model, x, torch.arange(M) % 2))


@pytest.mark.slow
def test_a_resnet_with_fixed_statistics():
    net = residual_network(num_classes=3).eval()
    model = classifier(to_bayesian_(net, prior_scale=1.0), num_data=N)
    found, expected = squares_at_mean(model, torch.randn(3, 3, 32, 32), torch.tensor([0, 2, 1]))
    assert len(found) == 14  # 12 convolutions, one Linear with a bias
    assert_equal(found, expected)


@pytest.mark.slow
def test_a_resnet_in_training_mode_by_the_rows_of_each_layer():
    net = residual_network(num_classes=3).train()
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    layers = {n: m for n, m in net.named_modules() if isinstance(m, nn.Conv2d)}
    x, y = torch.randn(3, 3, 32, 32), torch.tensor([0, 2, 1])

    def keep(name: str) -> Callable:
        def hook(module, args, output):
            inputs[name], outputs[name] = args[0].detach(), output

        return hook

    handles = [layer.register_forward_hook(keep(name)) for name, layer in layers.items()]
    torch.nn.functional.cross_entropy(net(x), y, reduction="sum")
    loss = torch.nn.functional.cross_entropy(net(x), y, reduction="sum")
    deltas = torch.autograd.grad(loss, list(outputs.values()))
    for handle in handles:
        handle.remove()
    expected = {}
    for (name, layer), delta in zip(layers.items(), deltas, strict=True):
        total = torch.zeros_like(layer.weight)
        for i in range(3):
            total += (
                torch.nn.grad.conv2d_weight(
                    inputs[name][i : i + 1], layer.weight.shape, delta[i : i + 1], layer.stride, layer.padding
                )
                .square()
                .detach()
            )
        expected[name] = N / 3 * total
    model = classifier(to_bayesian_(net, prior_scale=1.0), num_data=N)
    found, _ = squares_at_mean(model, x, y)
    for name, total in expected.items():
        torch.testing.assert_close(found[f"net.{name}.weight"], total.detach(), rtol=1e-8, atol=1e-10)
