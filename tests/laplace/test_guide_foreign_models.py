# SPDX-License-Identifier: Apache-2.0
"""Laplace's approximation of models that were written for other purposes."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.nn import PyroModule
from pyro.optim import Adam
from torch import Tensor, nn

from pyro_dvi import LaplaceGuide, classifier, predict, to_bayesian_
from pyro_dvi.laplace import Dense, PosteriorSamples
from tests.models import residual_network

ROWS = 12


def _fitted(
    model: Callable, batches: list, *, steps: int = 0, method: Any = None, **options: Any
) -> LaplaceGuide:
    guide = LaplaceGuide(model)
    guide.initialize(*batches[0])
    svi = SVI(model, guide, Adam({"lr": 0.02}), Trace_ELBO())
    for _ in range(steps):
        for batch in batches:
            svi.step(*batch)
    guide.fit(batches, method or Dense(), unconverged="accept", **options)
    return guide


def _jacobian_covariance(guide: LaplaceGuide, x: Tensor) -> Tensor:
    """J P^-1 J^T of the first outputs, with J by finite differences of the model."""
    from pyro_dvi.laplace.energy.query import Query

    fitted, mode = guide.fitted, guide.fitted.posterior.mode
    query = Query(guide._plain_model.get(), (x,), fitted.point.locs, fitted.layout)
    step = 1e-5
    columns = []
    for direction in torch.eye(fitted.layout.size, dtype=mode.dtype):
        high, low = (query.at(mode + s * step * direction).detach() for s in (1, -1))
        columns.append((high - low) / (2 * step))
    jacobian = torch.stack(columns, -1)  # [B, K, D]
    inverse = torch.linalg.inv(fitted.posterior.precision)
    return jacobian @ inverse @ jacobian.mT


class Recurrent(PyroModule):
    """An LSTM, with a Bayesian layer on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 4, batch_first=True)
        self.head = nn.Linear(4, 1)
        to_bayesian_(self.head)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        mean = self.head(self.lstm(x)[0][:, -1]).squeeze(-1)
        with pyro.plate("data", ROWS, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(mean, 0.3), obs=y)


def test_last_layer_of_an_lstm():
    model = Recurrent().double()
    x, y = torch.randn(ROWS, 5, 2).double(), torch.randn(ROWS).double()
    guide = _fitted(model, [(x[:7], y[:7]), (x[7:], y[7:])])
    prediction = predict(model, guide, (x, y))
    features = torch.cat([model.lstm(x)[0][:, -1], torch.ones(ROWS, 1)], -1).detach()
    precision = features.T @ features / 0.09 + torch.eye(5)
    expected = (features @ torch.linalg.inv(precision) * features).sum(-1) + 0.09
    torch.testing.assert_close(prediction.variance, expected, rtol=1e-6, atol=0)


def test_all_weights_of_an_lstm():
    model = Recurrent()
    to_bayesian_(model.lstm, include="*")
    model.double()
    x, y = torch.randn(ROWS, 3, 2).double(), torch.randn(ROWS).double()
    guide = _fitted(model, [(x, y)])
    expected = _jacobian_covariance(guide, x[:3])
    torch.testing.assert_close(guide.predictive(x[:3]).covariance, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.slow
def test_transformer():
    layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=6, batch_first=True, dropout=0.1)
    net = nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 3))
    to_bayesian_(net)
    model = classifier(net, num_data=ROWS).double()
    x, y = torch.randn(ROWS, 3, 4).double(), torch.arange(ROWS) % 3
    guide = _fitted(model, [(x[:8], y[:8]), (x[8:], y[8:])], steps=2)
    assert model.training
    assert all(module.training for module in net.modules())
    expected = _jacobian_covariance(guide, x[:2])
    torch.testing.assert_close(guide.predictive(x[:2]).covariance, expected, rtol=1e-5, atol=1e-8)
    assert predict(model, guide, (x, y)).metrics()["nll"] < 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_poisson_regression(dtype):
    def model(x: Tensor, y: Tensor | None = None) -> Any:
        w = pyro.sample("w", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
        with pyro.plate("data", 40, subsample_size=len(x)):
            return pyro.sample("y", dist.Poisson((x @ w).exp()), obs=y)

    x = torch.randn(40, 2, dtype=dtype)
    y = dist.Poisson((x @ x.new_tensor([0.5, -1.0])).exp()).sample()
    guide = _fitted(model, [(x[:25], y[:25]), (x[25:], y[25:])], steps=60)
    rate = (x @ guide.median()["w"]).exp()
    precision = x.T @ (rate.unsqueeze(-1) * x) + torch.eye(2, dtype=dtype)
    expected = (x @ torch.linalg.inv(precision) * x).sum(-1)
    torch.testing.assert_close(guide.predictive(x).variance, expected, rtol=1e-4, atol=1e-6)
    prediction = predict(model, guide, (x, y))
    assert prediction.mean.dtype == dtype
    torch.testing.assert_close(prediction.mean, rate * (expected / 2).exp(), rtol=1e-4, atol=0)


def test_heteroscedastic_network():
    def model(x: Tensor, y: Tensor | None = None) -> Any:
        w = pyro.sample("w", dist.Normal(x.new_zeros(1, 5), 1.0).to_event(2))
        v = pyro.sample("v", dist.Normal(x.new_zeros(5, 2), 1.0).to_event(2))
        mean, log_scale = (torch.tanh(x @ w) @ v).unbind(-1)
        with pyro.plate("data", ROWS, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(mean, nn.functional.softplus(log_scale) + 0.05), obs=y)

    x = torch.linspace(-2, 2, ROWS, dtype=torch.float64).unsqueeze(-1)
    y = x.sin().squeeze(-1)
    guide = _fitted(model, [(x, y)], steps=20)
    expected = _jacobian_covariance(guide, x[:3])
    found = guide.predictive(x[:3])
    torch.testing.assert_close(found.full_covariance, expected, rtol=1e-5, atol=1e-8)
    assert found.mean.shape == (3,)
    at_mode = predict(model, guide, (x, y))
    assert (at_mode.variance > found.variance.min()).all()


@pytest.mark.slow
def test_hierarchical_scale():
    def model(x: Tensor, y: Tensor | None = None) -> Any:
        tau = pyro.sample("tau", dist.HalfCauchy(x.new_ones(())))
        z = pyro.sample("z", dist.Normal(x.new_zeros(3), 1.0).to_event(1))
        noise = pyro.sample("noise", dist.HalfNormal(x.new_ones(())))
        with pyro.plate("data", 30, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(x @ (tau * z), noise), obs=y)

    x = torch.randn(30, 3, dtype=torch.float64)
    y = x @ x.new_tensor([1.0, 0.0, -1.0]) + 0.3 * torch.randn(30, dtype=torch.float64)
    guide = _fitted(model, [(x[:20], y[:20]), (x[20:], y[20:])], steps=100)
    drawn = guide.sample(50)
    assert (drawn["tau"] > 0).all() and (drawn["noise"] > 0).all()
    expected = _jacobian_covariance(guide, x[:4])
    torch.testing.assert_close(guide.predictive(x[:4]).full_covariance, expected, rtol=1e-5, atol=1e-8)
    prediction = predict(model, guide, (x, y))
    assert (prediction.variance > guide.median()["noise"] ** 2).all()
    assert prediction.metrics()["rmse"] < 0.5


@pytest.mark.parametrize("method", [Dense(), PosteriorSamples(32)], ids=["Dense", "PosteriorSamples"])
def test_last_layer_of_a_resnet(method):
    net = residual_network(num_classes=3)
    to_bayesian_(net, include="fc.*")
    model = classifier(net, num_data=6)
    x, y = torch.randn(6, 3, 32, 32), torch.tensor([0, 1, 2, 0, 1, 2])
    net.train()
    before = net.bn1.running_mean.clone()
    guide = _fitted(model, [(x[:4], y[:4]), (x[4:], y[4:])], method=method, subset="*fc*")
    prediction = predict(model, guide, [(x[:4], y[:4]), (x[4:], y[4:])])
    assert prediction.probabilities.shape == (6, 3)
    assert torch.equal(net.bn1.running_mean, before)
    assert net.training
    at_mode = guide.predictive(x[:2])
    assert at_mode.mean.dtype == torch.float32
    assert (at_mode.variance > 0).all()


def test_all_convolutions_of_a_network():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))
    to_bayesian_(net)
    model = classifier(net, num_data=ROWS).double()
    x, y = torch.randn(ROWS, 1, 4, 4).double(), torch.arange(ROWS) % 2
    guide = _fitted(model, [(x[:7], y[:7]), (x[7:], y[7:])])
    expected = _jacobian_covariance(guide, x[:3])
    torch.testing.assert_close(guide.predictive(x[:3]).covariance, expected, rtol=1e-5, atol=1e-8)


def test_observation_that_the_model_insists_on():
    def model(x: Tensor, y: Tensor) -> Any:
        w = pyro.sample("w", dist.Normal(x.new_zeros(()), 1.0))
        with pyro.plate("data", ROWS, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(x * w, 0.5), obs=y)

    x = torch.ones(ROWS)
    guide = _fitted(model, [(x, x)])
    torch.testing.assert_close(guide.predictive(x).variance, torch.full((ROWS,), 1 / (1 + ROWS / 0.25)))
    assert "nll" in predict(model, guide, (x, x)).metrics()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_a_device(dtype, device):
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2))
    to_bayesian_(net)
    model = classifier(net, num_data=ROWS).to(device, dtype)
    x, y = torch.randn(ROWS, 2, dtype=dtype), torch.arange(ROWS) % 2
    guide = _fitted(model, [(x.to(device), y.to(device))], steps=3)
    prediction = predict(model, guide, (x, y))  # moves the data itself
    assert prediction.probabilities.device == device
    assert prediction.probabilities.dtype == dtype
