# SPDX-License-Identifier: Apache-2.0
"""Every rule that chooses layers, on random networks that register their layers in another order than they run them.

The layers of a network form a random graph, and are square, so that a wrong layer or axis changes no shape. A fifth of
the layers have the transposed weights of a product ``x @ w``. Expected values come from the graph, and from derivatives
of the plain network.
"""

import copy
import random
from collections.abc import Iterator
from functools import partial

import pyro
import pytest
import torch
from pyro import poutine
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import pyro_dvi as dvi
from pyro_dvi.laplace import Dense, LaplaceGuide, last_layer
from pyro_dvi.moment_propagation import AllOutputs

SIZE, N, NOISE = 3, 7, 0.5
pytestmark = pytest.mark.usefixtures("double")


class Product(nn.Module):
    """A layer with inputs along the first axis of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(SIZE, SIZE))
        self.b = nn.Parameter(torch.randn(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w + self.b


class Pointwise(nn.Conv1d):
    """A convolution over one position."""

    def __init__(self) -> None:
        super().__init__(SIZE, SIZE, 1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[..., None])[..., 0]


LAYERS = [partial(nn.Linear, SIZE, SIZE), Product, Pointwise]
KINDS = (nn.Linear, Product, Pointwise)


class Tangle(nn.Module):
    """Layers in a random graph.

    Attributes:
        inputs: for each layer, in the order of execution, the earlier layers that it adds up; none for the data.
    """

    def __init__(self, draw: random.Random, kinds: list) -> None:
        super().__init__()
        count = draw.randint(3, 5)
        names = draw.sample("abcdefgh", count)
        self.inputs: dict[str, list[str]] = {}
        for k, name in enumerate(names):
            self.inputs[name] = draw.sample(names[:k], draw.randint(0, min(k, 2)))
        for name in draw.sample(names, count):  # the order of registration
            setattr(self, name, draw.choice(kinds)())

    def forward(self, x: Tensor) -> Tensor:
        values: dict[str, Tensor] = {}
        for name, inputs in self.inputs.items():
            values[name] = getattr(self, name)(sum(torch.tanh(values[i]) for i in inputs) if inputs else x)
        return sum(values[name] for name in self.ends())

    def ends(self) -> list[str]:
        """The layers whose results no layer takes."""
        return [name for name in self.inputs if not any(name in taken for taken in self.inputs.values())]

    def __repr__(self) -> str:
        return f"{self.inputs}, registered as {[name for name, _ in self.named_children()]}"


def networks(count: int, kinds: list = LAYERS) -> Iterator[tuple[random.Random, Tangle]]:
    for seed in range(count):
        pyro.clear_param_store()
        torch.manual_seed(seed)
        draw = random.Random(seed)
        yield draw, Tangle(draw, kinds)


def rows() -> tuple[Tensor, Tensor]:
    return torch.randn(N, SIZE), torch.randn(N, SIZE)


def model_of(net: Tangle, include=KINDS, exclude=()):
    found = (
        [k for k in include if any(isinstance(m, k) for m in net.modules())] if include is KINDS else include
    )
    bayesian = dvi.to_bayesian_(copy.deepcopy(net), include=found, exclude=exclude)
    return dvi.regressor(bayesian, num_data=N, noise_scale=NOISE)


def of(net: Tangle, layers: list[str]) -> set[str]:
    return {f"net.{name}" for name, _ in net.named_parameters() if name.partition(".")[0] in layers}


def jacobian(net: Tangle, sites: list[str], values: dict[str, Tensor], x: Tensor) -> Tensor:
    """The derivative [N * SIZE, D] of the outputs of the plain network by some of its parameters."""
    own = {name.removeprefix("net."): value.detach() for name, value in values.items()}
    varying = {site.removeprefix("net."): own[site.removeprefix("net.")] for site in sites}
    parts = jacrev(lambda weights: functional_call(net, {**own, **weights}, x))(varying)
    return torch.cat([parts[name].reshape(N * SIZE, -1) for name in varying], 1)


COUNTS = [pytest.param(24, id="quick"), pytest.param(500, id="many", marks=pytest.mark.soak)]


@pytest.mark.parametrize("count", COUNTS)
def test_the_last_layers_are_the_ends_of_the_graph(count):
    for draw, net in networks(count):
        frozen = draw.sample(list(net.inputs), draw.randint(0, 1))
        latent = [name for name in net.ends() if name not in frozen]
        if not latent:
            continue
        guide = LaplaceGuide(model_of(net, exclude=[f"{name}.*" for name in frozen]))
        assert set(last_layer(guide, [rows()])) == of(net, latent), net


@pytest.mark.parametrize("count", COUNTS)
def test_included_layers_are_those_of_the_name(count):
    """Each latent takes the place of the parameter of its name."""
    for draw, net in networks(count):
        chosen = draw.sample(list(net.inputs), draw.randint(1, 2))
        model, (x, _) = model_of(net, include=[f"{name}.*" for name in chosen]), rows()
        trace = poutine.trace(model.net).get_trace(x)
        drawn = {name: trace.nodes[name]["value"] for name in trace.stochastic_nodes}
        assert {name.removeprefix("net.") for name in drawn} == {
            s.removeprefix("net.") for s in of(net, chosen)
        }, net
        own = {name.removeprefix("net."): value for name, value in drawn.items()}
        torch.testing.assert_close(trace.nodes["_RETURN"]["value"], functional_call(net, own, x))


@pytest.mark.parametrize("count", COUNTS)
def test_a_subset_has_the_gauss_newton_matrix_of_its_parameters(count):
    for draw, net in networks(count // 3):
        layers = draw.choice([net.ends(), draw.sample(list(net.inputs), 2)])
        batch = rows()
        guide = LaplaceGuide(model_of(net))
        guide.initialize(*batch)
        subset = [f"net.{name}.*" for name in layers]
        precision = guide.fit([batch], Dense(), subset=subset, unconverged="accept", progress=False).precision
        names = guide.fitted.layout.names
        assert set(names) == of(net, layers), net
        rows_of = jacobian(net, names, guide.median(), batch[0])
        expected = rows_of.T @ rows_of / NOISE**2 + torch.eye(rows_of.shape[1])
        torch.testing.assert_close(precision, expected, msg=lambda text, net=net: f"{net}: {text}")


@pytest.mark.parametrize("count", COUNTS)
def test_a_last_layer_with_covariances_has_the_variance_of_its_parameters(count):
    r"""Outputs are linear in these weights: :math:`J \Sigma J^\top`, if the other layers are point masses."""
    for _, net in networks(count // 2):
        model, batch = model_of(net), rows()
        layers = [f"net.{name}" for name in net.ends()]
        guide = dvi.LastLayerGuide(model, layers, covariance=AllOutputs())
        guide.initialize(*batch)
        part = guide[-1]
        with torch.no_grad():
            part.scale_tril_unconstrained.copy_(torch.randn_like(part.scale_tril_unconstrained))
        posterior, order = part.get_posterior(), part.order
        rows_of = jacobian(net, list(part.prototype_trace.stochastic_nodes), guide.median(), batch[0])
        factor = (rows_of[:, order.argsort()] @ posterior.scale_tril[0]).detach()
        prediction = dvi.predict(model, guide, batch[0], dvi.Moments())
        expected = factor.square().sum(1).reshape(N, SIZE) + NOISE**2
        torch.testing.assert_close(prediction.variance, expected, msg=lambda text, net=net: f"{net}: {text}")


@pytest.mark.parametrize("count", COUNTS)
def test_input_units_are_the_axis_that_is_summed_over(count):
    r"""The relative variance :math:`\alpha` is one number for each input of a layer."""
    for _, net in networks(count):
        model, batch = model_of(net), rows()
        guide = dvi.MultiplicativeNoiseGuide(model)
        guide.initialize(*batch)
        with torch.no_grad():
            for parameter in guide.parameters():
                parameter.add_(torch.randn_like(parameter))
        for name, layer in net.named_children():
            site = f"net.{name}.{'w' if isinstance(layer, Product) else 'weight'}"
            posterior = guide.get_posterior()[site]
            alpha = ((posterior.variance - guide.eps) / posterior.mean**2).detach().reshape(SIZE, SIZE)
            by_input = alpha if isinstance(layer, Product) else alpha.T
            torch.testing.assert_close(by_input, by_input[:, :1].expand(-1, SIZE), rtol=1e-3, atol=0)
            assert not torch.allclose(by_input[0, 0], by_input[1:, 0], rtol=1e-2), net
