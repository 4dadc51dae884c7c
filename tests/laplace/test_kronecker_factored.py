# SPDX-License-Identifier: Apache-2.0
"""Kronecker factors against dense matrices and loops over examples."""

import copy
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

from pyro_dvi import classifier, regressor, to_bayesian_
from pyro_dvi.errors import (
    DviWarning,
)
from pyro_dvi.laplace import (
    Dense,
    Diagonal,
    KroneckerFactored,
    LaplaceGuide,
)
from tests.laplace.cases import fit, query_of
from tests.laplace.problems import guide_at


def linear_layers(x: Tensor, y: Tensor | None = None) -> Any:
    """One dense layer with its bias and three outputs: the Fisher information is the same for all examples."""
    weight = pyro.sample("weight", dist.Normal(x.new_zeros(3, 4), 0.5).to_event(2))
    bias = pyro.sample("bias", dist.Normal(x.new_zeros(3), 2.0).to_event(1))
    with pyro.plate("data", len(x)):
        noise = x.new_tensor([0.3, 0.5, 0.9])
        return pyro.sample("y", dist.Normal(nn.functional.linear(x, weight, bias), noise).to_event(1), obs=y)


def test_kronecker_factors_are_exact_for_one_dense_layer_and_a_prior_scale_for_weight_and_bias() -> None:
    torch.manual_seed(8)
    x, y = torch.randn(9, 4, dtype=torch.float64), torch.randn(9, 3, dtype=torch.float64)
    zeros = {"weight": torch.zeros(3, 4, dtype=torch.float64), "bias": torch.zeros(3, dtype=torch.float64)}
    guide = guide_at(linear_layers, (x, y), zeros)
    batches = [(x[:5], y[:5]), (x[5:], y[5:])]
    dense, found = fit(guide, batches, Dense()), fit(guide, batches, KroneckerFactored())
    torch.testing.assert_close(found.log_determinant(), dense.log_determinant())
    torch.testing.assert_close(found.marginal_variance(), dense.marginal_variance())
    query = query_of(guide, linear_layers, x)
    torch.testing.assert_close(found.joint_covariance(query), dense.joint_covariance(query))
    vectors = torch.randn(2, 15, dtype=torch.float64)
    torch.testing.assert_close(found.solve(vectors), dense.solve(vectors))


def test_kronecker_factors_of_a_network_are_those_of_a_loop_over_examples() -> None:
    """Inputs and gradients of each layer example by example, then the Kronecker product as a matrix."""
    torch.manual_seed(9)
    net = nn.Sequential(nn.Conv2d(2, 3, 2, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)).double()
    plain = copy.deepcopy(net)
    to_bayesian_(net)
    x, y = torch.randn(5, 2, 4, 4, dtype=torch.float64), torch.randint(3, (5,))

    def model(x: Tensor, y: Tensor | None = None) -> Any:
        logits = net(x)
        with pyro.plate("data", 5, subsample_size=len(x)):
            return pyro.sample("y", dist.Categorical(logits=logits), obs=y)

    guide = LaplaceGuide(model)
    guide.initialize(x, y)
    found = fit(guide, [(x[:3], y[:3]), (x[3:], y[3:])], KroneckerFactored())
    factors: dict[int, list[Any]] = {0: [0.0, 0.0], 3: [0.0, 0.0]}
    for i in range(5):
        h = plain[0](x[i : i + 1])
        f = plain[3](plain[2](plain[1](h)))
        log_p = f.log_softmax(-1)[0]
        patches = nn.functional.unfold(x[i : i + 1], 2, stride=2)[0].T
        inputs = {0: patches, 3: plain[2](plain[1](h)).detach()}
        for layer, out in ((0, h), (3, f)):
            a = torch.cat([inputs[layer], torch.ones(len(inputs[layer]), 1, dtype=torch.float64)], 1)
            factors[layer][0] += a.T @ a
            for k in range(3):
                (delta,) = torch.autograd.grad(log_p[k], out, retain_graph=True)
                delta = delta[0].flatten(1) if layer == 0 else delta.T
                factors[layer][1] += log_p[k].exp().detach() * delta @ delta.T / (5 * delta.shape[1])
    local = guide.energy([(x, y)])
    prior = local.at(local.start).prior_diagonal
    spans = dict(
        zip(local.layout.names, prior.split([v.numel() for v in local.layout.split(prior)]), strict=True)
    )
    total = torch.zeros((), dtype=torch.float64)
    for layer, (a, b) in factors.items():
        rows = [spans[f"{layer}.weight"].reshape(len(b), -1), spans[f"{layer}.bias"].unsqueeze(-1)]
        block = torch.kron(b, a) + torch.cat(rows, 1).flatten().diag()
        total = total + block.logdet()
    torch.testing.assert_close(found.log_determinant(), total)


def test_sites_without_factors_are_named_and_keep_their_diagonal() -> None:
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, dtype=torch.float64)

    def model(x: Tensor, y: Tensor | None = None) -> Any:
        scale = pyro.sample("scale", dist.Normal(x.new_ones(3), 1.0).to_event(1))
        weight = pyro.sample("weight", dist.Normal(x.new_zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal((x * scale) @ weight, 0.5), obs=y)

    locs = {"scale": torch.ones(3, dtype=torch.float64), "weight": torch.randn(3, dtype=torch.float64)}
    guide = guide_at(model, (x, y), locs)
    with pytest.warns(DviWarning, match="1 sites.*scale"):
        found = fit(guide, [(x, y)], KroneckerFactored())
    diagonal = fit(guide, [(x, y)], Diagonal())
    torch.testing.assert_close(found.marginal_variance()[:3], diagonal.marginal_variance()[:3])


@pytest.mark.parametrize("seed", range(3))
def test_one_example_with_dead_inputs_gives_the_dense_posterior(seed: int) -> None:
    """The factor of the inputs has rank one, and torch cannot decompose it in float32 for at least one of the seeds."""
    torch.manual_seed(seed)
    x = torch.relu(torch.randn(1, 299) - 1)
    x[:, 150:] = 0
    y, net = torch.zeros(1, 1), to_bayesian_(nn.Linear(299, 1))
    guide = LaplaceGuide(regressor(net, num_data=1, noise_scale=0.5))
    dense, found = fit(guide, [(x, y)], Dense()), fit(guide, [(x, y)], KroneckerFactored())
    torch.testing.assert_close(found.marginal_variance(), dense.marginal_variance(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        found.log_determinant().double(), dense.log_determinant(), atol=1e-3, rtol=1e-5
    )


def test_networks_with_dead_units_are_fitted() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 5), torch.tensor([0, 1])
    net = nn.Sequential(nn.Linear(5, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 2))
    with torch.no_grad():
        for layer in (net[0], net[2]):
            layer.bias[::2] = -100.0
    guide = LaplaceGuide(classifier(to_bayesian_(net), num_data=2))
    variance = fit(guide, [(x, y)], KroneckerFactored()).marginal_variance()
    assert variance.isfinite().all() and (variance > 0).all() and (variance <= 1 + 1e-5).all()
