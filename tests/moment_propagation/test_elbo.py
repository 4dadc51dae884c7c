# SPDX-License-Identifier: Apache-2.0
"""MomentPropagationELBO on models as users write them, against sampling and closed forms."""

import math
from functools import partial

import numpy as np
import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoDiagonalNormal, AutoNormal
from torch import nn
from torch.distributions import constraints

import pyro_dvi as dvi
from pyro_dvi.expectations import Sobol, TiltedBound
from pyro_dvi.guides import MeanFieldGuide
from pyro_dvi.moment_propagation.elbo import MomentPropagationELBO
from pyro_dvi.moment_propagation.multiplicative_noise import MultiplicativeNoiseGuide
from tests.models import gradients

GUIDES = {
    "MeanField": MeanFieldGuide,
    "MultiplicativeNoise": MultiplicativeNoiseGuide,
    "AutoNormal": partial(AutoNormal, init_loc_fn=dvi.bayesian.init_to_module),
    "AutoDiagonalNormal": partial(AutoDiagonalNormal, init_loc_fn=dvi.bayesian.init_to_module),
}
every_guide = pytest.mark.parametrize("guide_class", GUIDES.values(), ids=GUIDES)


@pytest.fixture
def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.linspace(-2, 2, 24, dtype=torch.float64).reshape(12, 2)
    return x, torch.sin(x.sum(1, keepdim=True))


def network(outputs: int = 1) -> nn.Module:
    net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(inplace=True), nn.Linear(16, outputs)).double()
    return dvi.to_bayesian_(net, prior_scale=1.0)


def sampled_loss(model, guide, data, draws: int = 80) -> tuple[float, float]:
    """Mean and standard error of Pyro's own loss."""
    trace = Trace_ELBO()
    losses = torch.tensor([trace.loss(model, guide, *data) for _ in range(draws)], dtype=torch.float64)
    return losses.mean().item(), losses.std().item() / math.sqrt(draws)


@pytest.mark.every(3)
@every_guide
def test_loss_of_one_hidden_layer_is_the_mean_of_sampled_losses(data, guide_class):
    """With certain inputs and Gaussian noise nothing is approximated. Two-sided z-test at 4, fixed seed."""
    model = dvi.regressor(network(), num_data=12, noise_scale=0.3)
    guide = guide_class(model)
    loss = MomentPropagationELBO().loss(model, guide, *data)
    mean, error = sampled_loss(model, guide, data)
    assert abs(loss - mean) < 4 * error
    assert error < 0.2 * abs(mean)


@pytest.mark.every(4)
@every_guide
def test_heteroscedastic_loss_is_close_to_that_of_samples(data, guide_class):
    """The outputs share hidden units, whose covariance is dropped: a percent, not an identity."""
    model = dvi.regressor(network(2), num_data=12, noise_scale=dvi.bayesian.Heteroscedastic())
    guide = guide_class(model)
    loss = MomentPropagationELBO().loss(model, guide, *data)
    mean, error = sampled_loss(model, guide, data)
    assert abs(loss - mean) < 4 * error + 0.01 * abs(mean)


@pytest.mark.parametrize("estimator", [Sobol(256), TiltedBound()], ids=lambda e: type(e).__name__)
def test_estimators_of_classes_agree_with_samples(data, estimator):
    model = dvi.classifier(network(3), num_data=12)
    labels = torch.arange(12) % 3
    guide = MeanFieldGuide(model)
    guide.initialize(data[0], labels)
    loss = MomentPropagationELBO(estimator=estimator).loss(model, guide, data[0], labels)
    mean, error = sampled_loss(model, guide, (data[0], labels))
    assert abs(loss - mean) < 4 * error + 0.01 * abs(mean)


@pytest.mark.slow
@every_guide
def test_training_lowers_the_loss_and_predicts(data, guide_class):
    model = dvi.regressor(network(), num_data=12, noise_scale=0.1)
    guide = guide_class(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), loss=MomentPropagationELBO(kl_weight=0.1))
    losses = [svi.step(*data) for _ in range(150)]
    assert losses[-1] < 0.2 * losses[0]
    prediction = dvi.predict(model, guide, data, method=dvi.Moments())
    assert prediction.metrics()["rmse"] < 0.2
    assert (prediction.variance > 0.1**2).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_loss_follows_the_dtype(data, dtype):
    model = dvi.regressor(network().to(dtype), num_data=12, noise_scale=0.3)
    guide = MultiplicativeNoiseGuide(model)
    loss = MomentPropagationELBO().differentiable_loss(model, guide, *(t.to(dtype) for t in data))
    assert loss.dtype is dtype
    loss.backward()
    assert all(gradient.dtype is dtype and gradient.isfinite().all() for gradient in gradients().values())


def test_a_functional_model_with_its_own_guide(data):
    def model(x, y=None):
        w1 = pyro.sample("w1", dist.Normal(x.new_zeros(2, 8), 1.0).to_event(2))
        w2 = pyro.sample("w2", dist.Normal(x.new_zeros(8), 1.0).to_event(1))
        mean = pyro.deterministic("mean", torch.tanh(x @ w1) @ w2)
        with pyro.plate("data", len(x)):
            return pyro.sample("obs", dist.Normal(mean, 0.5), obs=None if y is None else y[:, 0])

    def guide(x, y=None):
        for name, shape in (("w1", (2, 8)), ("w2", (8,))):
            loc = pyro.param(f"{name}_loc", lambda shape=shape: 0.3 * torch.randn(shape).to(x))
            scale = pyro.param(f"{name}_scale", x.new_full(shape, 0.2), constraint=constraints.positive)
            pyro.sample(name, dist.Normal(loc, scale).to_event(len(shape)))

    loss = MomentPropagationELBO().loss(model, guide, *data)
    mean, error = sampled_loss(model, guide, data)
    assert abs(loss - mean) < 4 * error


@pytest.mark.every(4)
@every_guide
def test_a_latent_noise_scale_is_sampled_and_its_weights_are_not(data, guide_class):
    model = dvi.regressor(network(), num_data=12, noise_scale=dist.LogNormal(-1.0, 0.3))
    guide = guide_class(model)
    guide(*data)
    elbo = MomentPropagationELBO()
    losses = torch.tensor([elbo.loss(model, guide, *data) for _ in range(30)])
    mean, error = sampled_loss(model, guide, data, draws=100)
    assert losses.std() > 0  # the scale is drawn
    assert abs(losses.mean() - mean) < 4 * math.hypot(error, losses.std() / math.sqrt(30))
    elbo.loss_and_grads(model, guide, *data)
    assert all(gradient.abs().sum() > 0 for name, gradient in gradients().items() if "noise_scale" in name)


def test_a_hierarchical_prior_keeps_its_curvature(data):
    """Parents of a prior are sampled: the loss agrees with samples of everything, on average."""

    def model(x, y=None):
        tau = pyro.sample("tau", dist.LogNormal(x.new_zeros(()), 0.5))
        w = pyro.sample("w", dist.Normal(x.new_zeros(2), tau).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("obs", dist.Normal(x @ w, 0.5), obs=None if y is None else y[:, 0])

    guide = MeanFieldGuide(model)
    guide.initialize(*data)
    elbo = MomentPropagationELBO(num_particles=10)
    losses = torch.tensor([elbo.loss(model, guide, *data) for _ in range(15)])
    mean, error = sampled_loss(model, guide, data, draws=150)
    assert abs(losses.mean() - mean) < 4 * math.hypot(error, losses.std() / math.sqrt(15))


def test_local_latents_in_a_subsampled_plate(data):
    """One shift for each example: closed form."""
    x, y = data

    def model(x, y=None):
        with pyro.plate("data", 24, subsample_size=12):
            z = pyro.sample("z", dist.Normal(x.new_zeros(()), 1.0))
            pyro.sample("obs", dist.Normal(z + x[:, 0], 0.5), obs=None if y is None else y[:, 0])

    def guide(x, y=None):
        with pyro.plate("data", 24, subsample_size=12):
            pyro.sample("z", dist.Normal(0.1 * x[:, 1], 0.2))

    q = dist.Normal(0.1 * x[:, 1], 0.2)
    fit = dist.Normal(q.loc + x[:, 0], 0.5).log_prob(y[:, 0]) - 0.5 * 0.2**2 / 0.5**2
    kl = torch.distributions.kl_divergence(q, dist.Normal(torch.zeros_like(q.loc), 1.0))
    loss = MomentPropagationELBO().loss(model, guide, x, y)
    assert loss == pytest.approx(2 * (kl - fit).sum().item())


def linear(site):
    """A linear model of one Gaussian weight whose likelihood is ``site(mean, y)``."""

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(x.new_zeros(()), 1.0))
        site(w * x[:, 0], y)

    def guide(x, y=None):
        pyro.sample("w", dist.Normal(x.new_tensor(0.3), 0.4))

    return model, guide


def plated(fn, y, **plate):
    with pyro.plate("data", len(y), **plate):
        return pyro.sample("obs", fn, obs=y)


LIKELIHOODS = {
    "mask": lambda m, y: plated(dist.Normal(m, 0.5).mask(y[:, 0] > 0), y[:, 0]),
    "masking handler": lambda m, y: poutine.mask(lambda: plated(dist.Normal(m, 0.5), y[:, 0]), y[:, 0] > 0)(),
    "event": lambda m, y: pyro.sample("obs", dist.Normal(m, 0.5).to_event(1), obs=y[:, 0]),
    "expand": lambda m, y: pyro.sample("obs", dist.Normal(m, 0.5).expand([3, 12]).to_event(2), obs=y.mT.expand(3, 12)),
    "scale handler": lambda m, y: poutine.scale(lambda: plated(dist.Normal(m, 0.5), y[:, 0]), 3.0)(),
    "original units": lambda m, y: plated(
        dist.TransformedDistribution(dist.Normal(m, 0.5), [torch.distributions.AffineTransform(1.0, 3.0)]), y[:, 0]
    ),
    "positive": lambda m, y: plated(dist.LogNormal(m, 0.5), y[:, 0].exp()),
    "factor": lambda m, y: pyro.factor("obs", -((y[:, 0] - m) ** 2).sum()),
    "two sites": lambda m, y: (
        pyro.sample("a", dist.Normal(m[:6], 0.5).to_event(1), obs=y[:6, 0]),
        pyro.sample("b", dist.Laplace(m[6:], 0.5).to_event(1), obs=y[6:, 0]),
    ),
    "deterministic": lambda m, y: (pyro.deterministic("m", m), plated(dist.Normal(m, 0.5), y[:, 0])),
}  # fmt: skip


def gauss_hermite(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Nodes and weights of a standard Gaussian."""
    z, weights = np.polynomial.hermite_e.hermegauss(count)
    return torch.tensor(z), torch.tensor(weights / weights.sum())


def gauss_legendre(count: int, limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    nodes, areas = np.polynomial.legendre.leggauss(count)
    z, weights = torch.tensor(limit * nodes), torch.tensor(limit * areas)
    return z, weights * torch.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_pyro_likelihoods_keep_their_meaning(data, kind):
    """Exact for one linear weight; quadrature over it is the reference."""
    model, guide = linear(LIKELIHOODS[kind])
    x, y = data
    elbo = MomentPropagationELBO()
    loss = elbo.loss(model, guide, x, y)
    # Gauss-Legendre where the likelihood has a kink, Gauss-Hermite (of 40 nodes) elsewhere
    kinked = kind == "two sites"
    z, density = gauss_legendre(500, 8.0) if kinked else gauss_hermite(40)
    expected = 0.0
    for w, p in zip(0.3 + 0.4 * z, density, strict=True):
        trace = poutine.trace(poutine.condition(model, {"w": w})).get_trace(x, y)
        trace.nodes["w"]["fn"] = dist.Normal(x.new_zeros(()), 1.0).mask(False)
        expected += p * trace.log_prob_sum()
    assert elbo.terms["log_likelihood"].item() == pytest.approx(expected.item(), rel=1e-4 if kinked else 1e-8)
    assert loss == pytest.approx((elbo.terms["kl"] - elbo.terms["log_likelihood"]).item())


def test_it_works_through_pyro_and_torch_interfaces(data):
    model = dvi.regressor(network(), num_data=12, noise_scale=0.3)
    guide = MeanFieldGuide(model)
    elbo = MomentPropagationELBO(num_data=12)
    module = elbo(model, guide)
    loss = module(*data)
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in guide.parameters())
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), loss=elbo)
    step = elbo.step
    assert svi.evaluate_loss(*data) == pytest.approx(loss.item())
    assert elbo.step == step
    with torch.no_grad():
        assert not elbo.differentiable_loss(model, guide, *data).requires_grad


def test_the_variance_floor_reaches_the_network(data):
    model = dvi.regressor(network(), num_data=12, noise_scale=0.3)
    guide = MeanFieldGuide(model)
    plain, floored = MomentPropagationELBO(), MomentPropagationELBO(variance_floor=1.0)
    assert floored.loss(model, guide, *data) > plain.loss(model, guide, *data)


@every_guide
def test_it_trains_on_a_device(data, guide_class, device):
    x, y = (t.float().to(device) for t in data)
    model = dvi.regressor(network().float().to(device), num_data=12, noise_scale=0.3)
    guide = guide_class(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), loss=MomentPropagationELBO())
    assert svi.step(x, y) > svi.step(x, y) > 0
    assert dvi.predict(model, guide, (x, y), method=dvi.Moments()).mean.device == device
