# SPDX-License-Identifier: Apache-2.0
"""Noisy K-FAC: closed forms of a linear regression, and its equations in NumPy."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor, nn

import pyro_dvi as dvi
from pyro_dvi.curvature.linearisation import ObservedSite
from pyro_dvi.natural_gradients import LayerFisher, NoisyKFAC
from tests.natural_gradients.layers import NOISE, N, covariance, design, matrix, regression

pytestmark = pytest.mark.usefixtures("double")

PLAIN = {"betas": (0.0, 0.0), "warmup_steps": 0, "max_step": None}
M = 8


def exact_labels(site: ObservedSite) -> Tensor:
    """Labels at one standard deviation from the mean, whose second moments over eight rows are those of the noise."""
    base = site.fn.base_dist
    signs = torch.tensor([[1.0, 1, 1], [1, 1, -1], [1, -1, 1], [1, -1, -1]])
    signs = torch.cat([signs, -signs]).repeat(len(base.loc) // 8, 1)[:, : base.loc.shape[1]]
    return base.loc.detach() + signs * base.scale


# A linear regression --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta, temperature", [(1.0, 1.0), (0.25, 1.0), (1.0, 0.5)])
def test_precision_of_a_linear_regression_is_exact_where_the_prior_is_wide(monkeypatch, beta, temperature):
    """Inputs and gradients are independent there, and one step at rate 1 has no memory."""
    monkeypatch.setattr(ObservedSite, "sample_labels", exact_labels)
    x, y = torch.randn(16, 2), torch.randn(16, 3)
    model = regression(nn.Linear(2, 3), 16, scale=1e5)
    guide = dvi.KroneckerGuide(model)
    elbo = dvi.NaturalGradientELBO(kl_weight=beta, temperature=temperature)
    SVI(model, guide, NoisyKFAC({**PLAIN, "lr": 1.0}), loss=elbo).step(x, y)
    gram = design(x).mT @ design(x)
    exact = torch.kron(torch.eye(3) / NOISE**2, gram) / (beta * temperature)
    torch.testing.assert_close(covariance(guide, "net.weight").inverse(), exact, rtol=1e-4, atol=1e-4)


def test_precision_with_a_prior_is_the_product_of_damped_factors(monkeypatch):
    monkeypatch.setattr(ObservedSite, "sample_labels", exact_labels)
    x, y, beta, scale = torch.randn(16, 2), torch.randn(16, 3), 0.3, 0.4
    model = regression(nn.Linear(2, 3), 16, scale)
    guide = dvi.KroneckerGuide(model)
    elbo = dvi.NaturalGradientELBO(kl_weight=beta)
    SVI(model, guide, NoisyKFAC({**PLAIN, "damping": 0.7}), loss=elbo).step(x, y)
    a, b = design(x).mT @ design(x) / 16, torch.eye(3) / NOISE**2
    gamma = beta / (16 * scale**2)  # the intrinsic damping; the extrinsic one leaves the posterior alone
    pi = (a.trace() / 3 / (b.trace() / 3)).sqrt()
    product = torch.kron(b + gamma**0.5 / pi * torch.eye(3), a + pi * gamma**0.5 * torch.eye(3))
    torch.testing.assert_close(
        covariance(guide, "net.weight").inverse(), 16 / beta * product, rtol=1e-10, atol=1e-10
    )


def test_a_step_of_kfac_ends_at_least_squares():
    """Without noise; labels from the model give it the curvature up to a factor, which one output and lr absorb."""
    x = torch.randn(16, 2)
    y = x @ torch.tensor([[1.0], [-2.0]]) + 0.5 + 0.1 * torch.randn(16, 1)
    model = regression(nn.Linear(2, 1), 16, scale=1e6)
    guide = dvi.KroneckerGuide(model)
    guide.initialize(x, y)
    residuals = y - x @ guide.median()["net.weight"].mT - guide.median()["net.bias"]
    lr = residuals.square().mean().item() / NOISE**2
    optimizer = NoisyKFAC({**PLAIN, "lr": lr, "estimate": LayerFisher(at_mean=True, observed=True)})
    elbo = dvi.NaturalGradientELBO()
    elbo.prepare(guide, optimizer)
    SVI(model, guide, optimizer, loss=elbo).step(x, y)
    exact = torch.linalg.lstsq(design(x), y).solution.flatten()
    found = matrix(guide.median(), "net").flatten()
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)


def test_the_loss_is_the_divergence_of_dependent_weights():
    """Averaged over draws it is that of the whole Gaussian."""
    x, y = torch.randn(6, 2), torch.randn(6, 2)
    model = regression(nn.Linear(2, 2), 6, 0.7)
    guide = dvi.KroneckerGuide(model)
    guide.initialize(x, y)
    with torch.no_grad():
        for factor in guide.parameters():
            if factor.dim() == 1 and len(factor) == 13:
                rows, columns = torch.randn(2, 2).tril(), torch.randn(3, 3).tril()
                for root in (rows, columns):
                    root.diagonal().abs_().add_(0.2)
                factor.copy_(torch.cat([rows.flatten(), columns.flatten()]))
    elbo, found = dvi.NaturalGradientELBO(), []
    for _ in range(300):
        elbo.loss(model, guide, x, y)
        found.append(elbo.terms["kl"].item())
    mean = matrix(guide.median(), "net").flatten()
    exact = torch.distributions.kl_divergence(
        torch.distributions.MultivariateNormal(mean, covariance(guide, "net.weight")),
        torch.distributions.MultivariateNormal(torch.zeros(6), 0.7**2 * torch.eye(6)),
    )
    error = np.std(found) / len(found) ** 0.5
    assert abs(np.mean(found) - exact.item()) < 4 * error


# The equations in NumPy -----------------------------------------------------------------------------------------


class Reference:
    """A network of two layers with tanh between them, trained by the equations of the paper."""

    def __init__(self, guide, scale: float) -> None:
        self.means = [matrix(guide.median(), str(k)).numpy() for k in (0, 2)]
        self.roots = [[r.detach().numpy().copy() for r in guide.roots(f"{k}.weight")] for k in (0, 2)]
        self.factors: list = [None, None]
        self.inverses: list = [None, None]
        self.momenta = [np.zeros_like(mean) for mean in self.means]
        self.delta, self.t = scale**-2, 0

    def step(self, x, y, draws, *, lr, betas, damping, beta, rho, observed, intervals) -> None:
        self.t += 1
        grads, measured = [0.0, 0.0], [[0.0, 0.0], [0.0, 0.0]]
        for noise, labels in draws:
            w = [
                m + rows @ z @ columns.T
                for m, (rows, columns), z in zip(self.means, self.roots, noise, strict=True)
            ]
            first = np.concatenate([x, np.ones((len(x), 1))], 1)
            hidden = np.tanh(first @ w[0].T)
            second = np.concatenate([hidden, np.ones((len(x), 1))], 1)
            f = second @ w[1].T

            def deltas(target, f=f, hidden=hidden, w=w):
                last = (f - target) / NOISE**2
                return last @ w[1][:, :-1] * (1 - hidden**2), last

            for k, (a, d, s) in enumerate(
                zip((first, second), deltas(y), deltas(y if observed else f + NOISE * labels), strict=True)
            ):
                grads[k] = grads[k] + d.T @ a / len(x) / len(draws)
                measured[k][0] = measured[k][0] + a.T @ a / len(x) / len(draws)
                measured[k][1] = measured[k][1] + s.T @ s / len(x) / len(draws)
        n = rho * N
        prior = beta * self.delta / n
        done = self.t - 1
        rate = max(1 - betas[1], 3 / (3 + done // intervals[0]))
        for k in range(2):
            if self.factors[k] is None:
                self.factors[k] = measured[k]
            elif done % intervals[0] == 0:
                self.factors[k] = [
                    (1 - rate) * old + rate * new
                    for old, new in zip(self.factors[k], measured[k], strict=True)
                ]
            total = grads[k] + prior * self.means[k]
            self.momenta[k] = betas[0] * self.momenta[k] + (1 - betas[0]) * total
            v = self.momenta[k] / (1 - betas[0] ** self.t)
            if done % intervals[1] == 0:
                self.inverses[k] = [np.linalg.inv(one) for one in self.damped(k, prior + damping)]
                a, b = self.damped(k, prior)
                self.roots[k] = [
                    np.linalg.cholesky(np.linalg.inv(b)),
                    np.linalg.cholesky(beta / n * np.linalg.inv(a)),
                ]
            inverse_a, inverse_b = self.inverses[k]
            self.means[k] = self.means[k] - lr * inverse_b @ v @ inverse_a

    def damped(self, k: int, gamma: float) -> tuple[np.ndarray, np.ndarray]:
        a, b = self.factors[k]
        pi = np.sqrt(np.trace(a) / len(a) / (np.trace(b) / len(b)))
        return a + pi * gamma**0.5 * np.eye(len(a)), b + gamma**0.5 / pi * np.eye(len(b))


@pytest.mark.every(3)
@pytest.mark.parametrize("beta", [1.0, 0.1])
@pytest.mark.parametrize(
    "particles, observed, intervals",
    [(1, False, (1, 1)), (3, False, (1, 1)), (2, True, (1, 1)), (1, False, (2, 3)), (2, False, (3, 2))],
)
def test_noisy_kfac_is_its_equations(beta, particles, observed, intervals):
    torch.manual_seed(5)
    x, scale = torch.randn(N, 2), 0.8
    y = torch.stack([x.sum(1).sin(), x[:, 0]], 1)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
    net = dvi.to_bayesian_(net, prior_scale=scale)

    def model(x, y):
        f = net(x)
        with pyro.plate("data", N, subsample=torch.arange(len(x))):  # which draws nothing
            pyro.sample("y", dist.Normal(f, NOISE).to_event(1), obs=y)

    guide = dvi.KroneckerGuide(model)
    guide.initialize(x[:M], y[:M])
    settings = {"lr": 0.3, "betas": (0.8, 0.9), "damping": 1e-2}
    options = {**settings, "data_augmentation": 3.0, "warmup_steps": 0, "max_step": None}
    every = dict(zip(("factor_interval", "inverse_interval"), intervals, strict=True))
    optimizer = NoisyKFAC({**options, **every, "estimate": LayerFisher(observed=observed)})
    elbo = dvi.NaturalGradientELBO(kl_weight=beta, num_particles=particles, num_data=N)
    elbo.prepare(guide, optimizer)
    svi = SVI(model, guide, optimizer, loss=elbo)
    reference = Reference(guide, scale)
    for t in range(12):
        rows = slice(M * (t % 3), M * (t % 3) + M - 3 * (t % 4 == 3))
        torch.manual_seed(t)
        draws = []
        for _ in range(particles):
            noise = []
            for p, q in ((3, 2), (2, 3)):
                weight, bias = torch.randn(p, q), torch.randn(p)
                noise.append(torch.cat([weight, bias[:, None]], 1).numpy())
            labels = torch.zeros_like(y[rows])
            if not observed and t % intervals[0] == 0:  # only then the model draws them
                labels = torch.normal(labels, 1.0)
            draws.append((noise, labels.numpy()))
        torch.manual_seed(t)
        svi.step(x[rows], y[rows])
        data, own = (x[rows].numpy(), y[rows].numpy()), {"observed": observed, "intervals": intervals}
        reference.step(*data, draws, beta=beta, rho=3.0, **own, **settings)
        means = guide.median()
        for k, layer in enumerate((0, 2)):
            found = matrix(means, str(layer)).numpy()
            np.testing.assert_allclose(found, reference.means[k], rtol=1e-10, atol=1e-12)
            for root, expected in zip(guide.roots(f"{layer}.weight"), reference.roots[k], strict=True):
                np.testing.assert_allclose(root.detach().numpy(), expected, rtol=1e-10, atol=1e-12)
