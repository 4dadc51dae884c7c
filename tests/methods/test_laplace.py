# SPDX-License-Identifier: Apache-2.0
"""Laplace's approximation in one call."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_dvi as dvi
from pyro_dvi.errors import ArgumentError
from pyro_dvi.laplace import ByValidation, KroneckerFactored
from tests.methods.cases import EPOCHS, loader, network, rows, slope


def test_a_trained_network_gets_a_gaussian_around_its_weights():
    net = network(1)
    data = rows(60, 0, labels=False)
    adam = torch.optim.Adam(net.parameters(), 0.02)
    for _ in range(200):
        adam.zero_grad()
        nn.functional.mse_loss(net(data[0])[:, 0], data[1]).backward()
        adam.step()
    x = rows(20, 1)[0]
    everything = dvi.Laplace(
        layers=None, covariance=KroneckerFactored(), noise_scale=0.1, unconverged="accept"
    )
    posterior = everything.fit(net, loader(labels=False), progress=False)
    near, far = posterior.predict(x).epistemic, posterior.predict(10 * x).epistemic
    assert float(far.mean()) > 2 * float(near.mean()) > 0
    assert posterior.history.epoch == 0 and "KroneckerPosterior" in repr(posterior.guide)
    last = dvi.Laplace(noise_scale=0.1).fit(net, loader(labels=False), progress=False)
    assert torch.equal(last.guide.median()["net.0.weight"], net[0].weight)
    polished = last.guide.median()["net.2.weight"] - net[2].weight
    assert 0 < float(polished.detach().abs().max()) < 1


@pytest.mark.filterwarnings("ignore:the best value of PriorPrecision")
@pytest.mark.parametrize(
    "as_given", [tuple, lambda pair: [pair], lambda pair: DataLoader(TensorDataset(*pair), 40)]
)
def test_the_prior_is_tuned_on_validation_data(as_given):
    def gaussian(validation):
        return dvi.Laplace().fit(network(), loader(), EPOCHS, validation=validation, progress=False)

    held_out, test = rows(40, 2), rows(20, 1)
    plain, tuned = gaussian(None), gaussian(as_given(held_out))
    with plain.in_store():
        plain.guide.tune(loader(), criterion=ByValidation([held_out]), progress=False)
    assert plain.guide.scale_factors == pytest.approx(tuned.guide.scale_factors) != {}
    torch.testing.assert_close(plain.predict(test).probabilities, tuned.predict(test).probabilities)


def test_the_last_layer_of_a_model_that_is_a_function():
    """The weights of a linear model, whose Laplace approximation is exact."""
    posterior = dvi.Laplace().fit(slope, loader(labels=False), progress=False)
    x = rows(60, 0)[0]
    torch.testing.assert_close(posterior.guide.posterior.precision, x.T @ x / 0.1**2 + torch.eye(3))


def test_a_data_set_is_no_loader():
    data = TensorDataset(*rows(60, 0))
    with pytest.raises(ArgumentError, match="loader must yield batches"):
        dvi.MAP().fit(network(), data, 1, progress=False)
    with pytest.raises(ArgumentError, match="validation must yield batches"):
        dvi.Laplace().fit(network(), loader(), validation=data, progress=False)


@pytest.mark.parametrize("named", [False, True])
def test_the_noise_of_a_trained_network_is_that_of_its_residuals(named):
    """No training adapts a learned scale to a network that is trained already; one that is given stays."""
    x = torch.linspace(-1, 1, 200, dtype=torch.float64)[:, None]
    y = 2 * x + 0.1 * torch.randn(200, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    net = nn.Linear(1, 1).double()
    with torch.no_grad():
        net.weight.fill_(2.0), net.bias.zero_()
    data: Any = TensorDataset(x, y)
    loader = DataLoader([{"input": a, "y": b} for a, b in data] if named else data, 50)
    posterior = dvi.Laplace().fit(net, loader, progress=False)
    residuals = (y - 2 * x).square().mean().sqrt()
    assert torch.allclose(posterior.model.noise_scale, residuals, rtol=1e-6)
    given = dvi.Laplace(noise_scale=0.5).fit(net, loader, progress=False)
    assert given.model.noise_scale == 0.5
