# SPDX-License-Identifier: Apache-2.0
"""Models of which the layers do not tell the gradients of single examples: every method agrees with plain autograd."""

import math

import pyro
import pytest
import torch
from torch import Tensor, nn

import pyro_dvi as dvi
from pyro_dvi.curvature import EmpiricalFisher, GGNDiagonal, reverse_delta
from pyro_dvi.errors import DviWarning, UnsupportedError
from pyro_dvi.laplace import Dense, Diagonal
from tests.objectives.loops import assert_equal, squares_at_mean

pytestmark = [
    pytest.mark.usefixtures("double"),
    pytest.mark.filterwarnings("default:.*disagree with the gradient:pyro_dvi.errors.DviWarning"),
]
M, N, NOISE = 4, 12, 0.5


class Energy(nn.Module):
    """A force, the gradient of a learned energy, as in physics-informed networks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            z = x.clone().requires_grad_()
            energy = self.last(self.first(z).tanh()).sum()
            return torch.autograd.grad(energy, z, create_graph=True)[0]


class Positions(nn.Module):
    """Tokens with a table of positions as long as the minibatch."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(M, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x[:, None] + self.table(torch.arange(M))).tanh().mean(1))


every_network = pytest.mark.parametrize("network", [Energy, Positions])


def model_and_data(network: type[nn.Module]) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(1)
    net = dvi.to_bayesian_(network(), prior_scale=1.0, include=nn.Module)
    return dvi.regressor(net, num_data=N, noise_scale=NOISE), torch.randn(M, 3), torch.randn(M, 3)


def jacobian(network: type[nn.Module]) -> tuple[Tensor, Tensor]:
    """Return J ``[M, 3, D]`` of the outputs, and these, by plain autograd."""
    torch.manual_seed(1)
    net = network()
    x = torch.randn(M, 3)
    outputs = net(x)
    rows = [
        torch.cat(
            [
                g.flatten()
                for g in torch.autograd.grad(
                    f, list(net.parameters()), retain_graph=True, allow_unused=True, materialize_grads=True
                )
            ]
        )
        for f in outputs.flatten()
    ]
    return torch.stack(rows).unflatten(0, outputs.shape), outputs.detach()


@every_network
@pytest.mark.parametrize("curvature", [GGNDiagonal, EmpiricalFisher])
def test_penalties(network, curvature):
    model, x, y = model_and_data(network)
    rows, outputs = jacobian(network)
    if curvature is GGNDiagonal:
        squares = rows.square().sum((0, 1)) / NOISE**2
    else:
        squares = torch.einsum("mk,mkd->md", (y - outputs) / NOISE**2, rows).square().sum(0)
    guide = dvi.MeanFieldGuide(model)
    guide.initialize(x, y)
    elbo = dvi.TaylorELBO(curvature=curvature())
    with pytest.warns(DviWarning, match="net.*disagree with the gradient") as caught:
        for _ in range(3):
            elbo.loss(model, guide, x, y)
    assert len(caught) == 1
    scale = math.exp(-3)
    torch.testing.assert_close(elbo.terms["penalty"], N / M * scale**2 / 2 * squares.sum())


@every_network
def test_squares_of_natural_gradients(network):
    model, x, y = model_and_data(network)
    assert_equal(*squares_at_mean(model, x, y))


@every_network
@pytest.mark.parametrize("method", [Dense, Diagonal])
def test_precision_and_variance_of_laplace(network, method):
    model, x, y = model_and_data(network)
    rows, _ = jacobian(network)
    flat = rows.flatten(0, 1) / NOISE
    whole = dvi.regressor(model.net, num_data=M, noise_scale=NOISE)
    guide = dvi.LaplaceGuide(whole)
    with pytest.warns(DviWarning, match="disagree with the gradient"):
        guide.fit([(x, y)], method(), unconverged="accept")
        precision = flat.mT @ flat + torch.eye(flat.shape[1])
        if method is Diagonal:
            precision = precision.diagonal().diag_embed()
        variance = torch.einsum("mkd,de,mke->mk", rows, precision.inverse(), rows)
        torch.testing.assert_close(guide.predictive(x).variance, variance)


class Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.tanh()

    @staticmethod
    def backward(ctx, delta):
        return delta


class Middle(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "custom":
            return Cut.apply(x)
        if self.kind == "detach":
            return x.tanh().detach()
        with torch.set_grad_enabled(self.kind != "no_grad"):
            return x.tanh()


@pytest.mark.parametrize("guide", [dvi.MeanFieldGuide, dvi.MultiplicativeNoiseGuide])
@pytest.mark.parametrize("kind", ["custom", "detach", "no_grad"])
def test_weights_vary_where_the_model_stops_gradients(kind, guide):
    def variance(kind: str) -> Tensor:
        torch.manual_seed(0)
        pyro.clear_param_store()
        net = nn.Sequential(nn.Linear(3, 6), Middle(kind), nn.Linear(6, 1))
        model = dvi.regressor(dvi.to_bayesian_(net, prior_scale=1.0), num_data=M, noise_scale=1e-3)
        posterior, x = guide(model), torch.randn(M, 3)
        posterior.initialize(x, torch.zeros(M, 1))
        method = dvi.Moments(propagation=dvi.ReverseDelta())
        return dvi.predict(model, posterior, x, method=method).variance

    torch.testing.assert_close(variance(kind), variance("plain"))


@pytest.mark.parametrize("also_slow", [False, True])
def test_variances_that_a_plain_gradient_contradicts(monkeypatch, also_slow):
    """A rule that is wrong gives way to passes for each example; a wrong call is refused."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    model = dvi.regressor(dvi.to_bayesian_(net, prior_scale=1.0), num_data=M, noise_scale=1e-3)
    guide, x = dvi.MeanFieldGuide(model), torch.randn(M, 3)
    guide.initialize(x, torch.zeros(M, 1))
    method = dvi.Moments(propagation=dvi.ReverseDelta())
    right = dvi.predict(model, guide, x, method=method).variance
    contracted = reverse_delta._contracted
    monkeypatch.setattr(
        reverse_delta, "_contracted", lambda *args: lambda delta: contracted(*args)(delta) / 2
    )
    if also_slow:
        monkeypatch.setattr(reverse_delta.Call, "pulled_back", lambda self, deltas: {})
        with pytest.raises(UnsupportedError, match=r"the reverse delta method.*Independent\(\)"):
            dvi.predict(model, guide, x, method=method)
    else:
        torch.testing.assert_close(dvi.predict(model, guide, x, method=method).variance, right)
