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


@pytest.mark.slow
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


@pytest.mark.every(3)
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
    precision = (x.T @ x / 0.1**2 + torch.eye(3)).double()
    torch.testing.assert_close(posterior.guide.posterior.precision, precision, rtol=1e-5, atol=1e-5)


def test_a_data_set_is_no_loader():
    data = TensorDataset(*rows(60, 0))
    with pytest.raises(ArgumentError, match="loader must yield batches"):
        dvi.MAP().fit(network(), data, 1, progress=False)
    with pytest.raises(ArgumentError, match="validation must yield batches"):
        dvi.Laplace().fit(network(), loader(), validation=data, progress=False)


@pytest.mark.every(2)
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


def residual_scale(posterior, data):
    """The root mean square of the residuals under the posterior."""
    found = posterior.predict(data)
    return (found.metrics()["rmse"] ** 2 + float(found.epistemic.mean())) ** 0.5


def moving(rows=600):
    """Standardised inputs that are nearly collinear, and smooth targets without noise, in float32."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(rows, 3, generator=generator)
    x = torch.tanh(z @ torch.randn(3, 14, generator=generator))
    x += 0.003 * torch.randn(rows, 14, generator=generator)
    y = z[:, :1] - z[:, 1:2].sin()
    return (x - x.mean(0)) / x.std(0), y / y.std()


def briefly_trained(data, steps):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(14, 20), nn.Tanh(), nn.Linear(20, 1))
    adam = torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(steps):
        adam.zero_grad()
        nn.functional.mse_loss(net(data[0]), data[1]).backward()
        adam.step()
    return net


@pytest.mark.every(2)
@pytest.mark.parametrize("epochs", [0, 3])
def test_the_noise_is_that_of_the_residuals_where_the_fit_stands(epochs):
    data = moving()
    net = briefly_trained(data, 10)
    before = float(nn.functional.mse_loss(net(data[0]), data[1]).sqrt().detach())
    posterior = dvi.Laplace().fit(net, [data], epochs, progress=False)
    noise = float(posterior.model.noise_scale.detach())
    assert noise == pytest.approx(residual_scale(posterior, data), rel=0.01)
    assert noise < 0.8 * before


@pytest.mark.every(3)
@pytest.mark.parametrize(("count", "size"), [(400, 3), (30, 12), (12, 30)])
def test_the_noise_of_a_linear_model_is_that_of_the_em_algorithm(count, size):
    """With fewer rows than weights, all residuals can vanish; the noise must not follow them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, size, generator=generator, dtype=torch.float64)
    y = x[:, :2].sum(1, keepdim=True) + 0.3 * torch.randn(count, 1, generator=generator, dtype=torch.float64)
    net = nn.Linear(size, 1, bias=False).double()
    posterior = dvi.Laplace().fit(net, [(x, y)], progress=False)

    noise = (net(x) - y).square().mean().sqrt().detach()
    for _ in range(4):
        covariance = torch.linalg.inv(x.T @ x / noise**2 + torch.eye(size))
        residuals = y - x @ covariance @ x.T @ y / noise**2
        after = (residuals.square().mean() + (x @ covariance * x).sum(1).mean()).sqrt()
        if 0.99 < after / noise < 1.01:
            break
        noise = after
    torch.testing.assert_close(posterior.model.noise_scale.detach(), noise, rtol=1e-4, atol=0.0)
    assert noise > 0.1


def test_a_model_with_a_noise_of_its_own_keeps_it():
    data = rows(60, 0, labels=False)
    model = dvi.regressor(dvi.to_bayesian_(nn.Linear(3, 1)), 60, 0.3)
    posterior = dvi.Laplace().fit(model, [(data[0], data[1][:, None])], progress=False)
    assert posterior.model.noise_scale == 0.3


def test_a_nearly_singular_precision_in_single_precision():
    """The Gauss-Newton matrix is that of the same network in double precision, although its condition is above 1e7."""
    data = moving()
    net = briefly_trained(data, 300)
    method = dvi.Laplace(layers=None, noise_scale=1e-4, unconverged="accept")
    model = method.svi(net, [data], 0).model
    guide = dvi.LaplaceGuide(model)
    guide.initialize(*data)
    single = guide.fit([data], unconverged="accept")
    wide = tuple(part.double() for part in data)
    guide = dvi.LaplaceGuide(method.svi(net.double(), [wide], 0).model)
    guide.initialize(*wide)
    double = guide.fit([wide], unconverged="accept")
    eigenvalues = torch.linalg.eigvalsh(double.precision)
    assert eigenvalues[-1] > 1e7 * eigenvalues[0]
    torch.testing.assert_close(
        single.precision, double.precision, rtol=1e-3, atol=1e-3 * float(eigenvalues[-1])
    )
    assert single.log_determinant() == pytest.approx(float(double.log_determinant()), rel=0.01)
    assert bool((single.marginal_variance() <= 1.001).all())
