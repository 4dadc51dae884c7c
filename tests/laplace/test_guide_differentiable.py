# SPDX-License-Identifier: Apache-2.0
"""Gradients of predictions with respect to inputs, and of the evidence with respect to tensors of the model."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck

import pyro_dvi as dvi
from pyro_dvi.errors import ArgumentError, UnsupportedError
from pyro_dvi.laplace import (
    ConjugateGradient,
    Dense,
    Diagonal,
    Functional,
    Hessian,
    KroneckerFactored,
    LaplaceGuide,
    Method,
    PosteriorSamples,
    TopEigen,
)
from tests.laplace.problems import LinearRegression

METHODS = [
    Dense(),
    ConjugateGradient(tolerance=1e-12),
    Diagonal(),
    KroneckerFactored(),
    Functional(),
    TopEigen(10),
    PosteriorSamples(8),
]
of_method = pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)


def fitted(method: Method, net: nn.Module, x: Tensor) -> LaplaceGuide:
    model = dvi.regressor(dvi.to_bayesian_(net), num_data=len(x), noise_scale=0.5)
    guide = LaplaceGuide(model)
    guide.fit([(x, net(x).detach() + 0.5)], method, unconverged="accept")
    return guide


@pytest.mark.every(5)
@of_method
@pytest.mark.parametrize("layers", ["normalised", "convolution"])
def test_predictions_have_the_gradients_of_finite_differences(method, layers):
    torch.manual_seed(0)
    if layers == "normalised":
        net = nn.Sequential(nn.Linear(2, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 2)).double()
        x = torch.randn(12, 2, dtype=torch.float64)
    else:
        net = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(6, 2)).double()
        x = torch.randn(12, 1, 5, dtype=torch.float64)
    guide = fitted(method, net, x)

    def outputs(inputs: Tensor) -> tuple[Tensor, ...]:
        found = guide.predictive(inputs, joint=True)
        return found.mean, found.variance, found.joint_covariance, guide.predictive(inputs).covariance

    query = x[:2].clone().requires_grad_()
    assert gradcheck(outputs, query)
    # Without gradients, the same values.
    for found, plain in zip(outputs(query), outputs(x[:2]), strict=True):
        assert found.requires_grad and not plain.requires_grad
        torch.testing.assert_close(found.detach(), plain, rtol=1e-8, atol=1e-10)
    with torch.no_grad():
        assert not any(found.requires_grad for found in outputs(query))


@pytest.mark.parametrize("method", [Dense(), ConjugateGradient(tolerance=1e-12)], ids=type)
def test_variances_of_a_linear_regression_have_their_known_gradients(method):
    problem = LinearRegression()
    guide = problem.guide()
    guide.fit(problem.batches, method)
    x = problem.x[:4].clone().requires_grad_()
    found = guide.predictive(x)
    of_mean, of_variance = (
        torch.autograd.grad(t.sum(), x, retain_graph=True)[0] for t in (found.mean, found.variance)
    )
    torch.testing.assert_close(of_mean, problem.mode().expand(4, -1))
    torch.testing.assert_close(of_variance, 2 * torch.linalg.solve(problem.precision(), x.detach().mT).mT)


def test_functions_and_second_derivatives():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = torch.linspace(-1, 1, 10, dtype=torch.float64).unsqueeze(-1)
    guide = fitted(Dense(), net, x)
    query = x[:2].clone().requires_grad_()
    assert gradcheck(guide.functions(3), query)

    def slope(inputs: Tensor) -> Tensor:
        variance = guide.predictive(inputs).variance.sum()
        return torch.autograd.grad(variance, inputs, create_graph=True)[0]

    assert gradcheck(slope, query)


def test_subset_without_inputs_has_constant_variances():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x = torch.linspace(-1, 1, 10, dtype=torch.float64).unsqueeze(-1)
    model = dvi.regressor(dvi.to_bayesian_(net), num_data=10, noise_scale=0.5)
    guide = LaplaceGuide(model)
    guide.fit([(x, x)], Dense(), subset="net.2.bias", unconverged="accept")
    found = guide.predictive(x.requires_grad_())
    torch.testing.assert_close(found.variance, torch.full((10,), 1 / 41.0, dtype=torch.float64))


# The evidence ---------------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """y = tanh(x A) W1 W2 + noise: scales and A are parameters, W1, W2 and the noise of the second output latent."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale, self.log_noise = nn.Parameter(torch.tensor(0.1)), nn.Parameter(torch.tensor(-0.3))
        self.first = nn.Linear(2, 2)
        self.double()

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        scale, zero = self.log_scale.exp(), x.new_zeros(())
        noise = pyro.sample("noise", dist.LogNormal(zero, 1.0))
        hidden = pyro.sample("hidden", dist.Normal(zero, scale).expand([4, 2]).to_event(2))
        last = pyro.sample("last", dist.Normal(zero, 2 * scale).expand([2, 4]).to_event(2))
        out = torch.tanh(torch.tanh(self.first(x)) @ hidden.mT) @ last.mT
        scales = torch.stack([self.log_noise.exp(), self.log_noise.exp() * noise])
        with pyro.plate("data", 12, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(out, scales).to_event(1), obs=y)


def scaled_problem() -> tuple[Scaled, LaplaceGuide, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(1)
    model = Scaled()
    x, y = torch.randn(12, 2, dtype=torch.float64), torch.randn(12, 2, dtype=torch.float64)
    guide = LaplaceGuide(model)
    guide.initialize(x, y)
    with torch.no_grad():
        for loc in guide.locs.parameters():
            loc.copy_(0.7 * torch.randn_like(loc))
    return model, guide, [(x[:7], y[:7]), (x[7:], y[7:])]


def test_evidence_of_linear_regression_has_the_gradient_of_its_closed_form():
    problem = LinearRegression()
    scales = torch.tensor([problem.prior_scale, problem.noise], dtype=torch.float64, requires_grad=True)
    problem.prior_scale, problem.noise = scales.unbind()  # type: ignore[assignment]
    guide = problem.guide()
    found = guide.differentiable_log_evidence(problem.batches)
    eye = torch.eye(problem.num_data, dtype=torch.float64)
    covariance = scales[0] ** 2 * problem.x @ problem.x.T + scales[1] ** 2 * eye
    exact = dist.MultivariateNormal(torch.zeros_like(problem.y), covariance).log_prob(problem.y)
    torch.testing.assert_close(found, exact)
    gradients = [torch.autograd.grad(value, scales)[0] for value in (found, exact)]
    torch.testing.assert_close(*gradients)


@pytest.mark.every(3)
@pytest.mark.parametrize("method", [Dense(), Diagonal(), KroneckerFactored(), Functional()], ids=type)
def test_evidence_has_the_gradient_of_finite_differences(method):
    model, guide, batches = scaled_problem()
    subset = ("hidden", "last") if isinstance(method, Functional | KroneckerFactored) else None

    def evidence(*_: Tensor) -> Tensor:
        return guide.differentiable_log_evidence(batches, method, subset=subset)

    # gradcheck changes the parameters in place.
    assert gradcheck(evidence, tuple(model.parameters()))
    guide.fit(batches, method, subset=subset, unconverged="accept")
    assert guide.log_evidence(batches).value == pytest.approx(evidence().item(), rel=1e-9)


@pytest.mark.parametrize("method", [Dense(Hessian()), TopEigen(5), ConjugateGradient()], ids=type)
def test_methods_without_a_differentiable_determinant_are_named(method):
    _, guide, batches = scaled_problem()
    with pytest.raises(UnsupportedError, match="use Dense"):
        guide.differentiable_log_evidence(batches, method)


def test_tempered_posterior_has_no_differentiable_evidence():
    problem = LinearRegression()
    guide = LaplaceGuide(problem.model, temperature=0.5)
    guide.initialize(*problem.batches[0])
    with pytest.raises(ArgumentError, match="temperature"):
        guide.differentiable_log_evidence(problem.batches)


class Elementwise(nn.Module):
    """Weights with a prior scale each, in a model that mixes a matrix product and a function without a rule."""

    def __init__(self, noise: type = dist.Normal) -> None:
        super().__init__()
        self.noise = noise
        self.scales, self.factor = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.tensor(0.8))
        self.double()

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        weight = pyro.sample("weight", dist.Normal(x.new_zeros(()), self.scales).to_event(2))
        other = pyro.sample("other", dist.Normal(x.new_zeros(3), 1.0).to_event(1))
        out = torch.tanh(x @ weight.mT).sum(-1) + torch.einsum("bd,d->b", x, torch.sin(other) * self.factor)
        with pyro.plate("data", len(x)):
            return pyro.sample("y", self.noise(out, self.factor), obs=y)


def elementwise_problem(noise: type = dist.Normal) -> tuple[Any, LaplaceGuide, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(2)
    model, batches = Elementwise(noise), [(torch.randn(6, 3).double(), torch.randn(6).double())]
    guide = LaplaceGuide(model)
    guide.initialize(*batches[0])
    with torch.no_grad():
        for loc in guide.locs.parameters():
            loc.copy_(0.7 * torch.randn_like(loc))
    return model, guide, batches


@pytest.mark.every(3)
@pytest.mark.parametrize("method", [Dense(), Diagonal(), KroneckerFactored(), Functional()], ids=type)
@pytest.mark.filterwarnings("ignore:KroneckerFactored:pyro_dvi.errors.DviWarning")
def test_evidence_with_equal_scales(method):
    model, guide, batches = elementwise_problem()

    def evidence(*_: Tensor) -> Tensor:
        return guide.differentiable_log_evidence(batches, method)

    assert gradcheck(evidence, tuple(model.parameters()))


@pytest.mark.parametrize("method", [Dense(), Diagonal(), KroneckerFactored(), Functional()], ids=type)
@pytest.mark.filterwarnings("ignore:KroneckerFactored:pyro_dvi.errors.DviWarning")
def test_evidence_of_weights_without_rules(method):
    torch.manual_seed(2)
    scale, factor = torch.tensor([0.7, 1.3], dtype=torch.float64)
    zeros = torch.zeros(3, dtype=torch.float64)

    def model(x: Tensor, y: Tensor | None = None) -> Any:
        w = pyro.sample("w", dist.Normal(zeros, scale).to_event(1))
        v = pyro.sample("v", dist.Normal(zeros[:2], factor).to_event(1))
        out = torch.einsum("bd,d->b", x, torch.sin(w) * factor) + v.prod() * scale
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(out, (x[:, 0] * v[0] * scale).exp()), obs=y)

    batches = [(torch.randn(8, 3).double(), torch.randn(8).double())]
    guide = LaplaceGuide(model)
    guide.initialize(*batches[0])
    with torch.no_grad():
        for loc in guide.locs.parameters():
            loc.copy_(0.7 * torch.randn_like(loc))

    def evidence(first: Tensor, second: Tensor) -> Tensor:
        nonlocal scale, factor
        scale, factor = first, second
        return guide.differentiable_log_evidence(batches, method)

    inputs = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (0.7, 1.3)]
    assert gradcheck(evidence, inputs)


def test_evidence_from_drawn_labels_is_refused():
    _, guide, batches = elementwise_problem(lambda loc, scale: dist.Gumbel(loc, scale))
    with pytest.raises(UnsupportedError, match="Gumbel at site 'y' has no closed-form Fisher information"):
        guide.differentiable_log_evidence(batches)


@pytest.mark.parametrize("method", [Dense(), Diagonal(), KroneckerFactored()], ids=type)
def test_variances_have_gradients_at_zero_inputs(method):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 4, bias=False), nn.Tanh(), nn.Linear(4, 1, bias=False)).double()
    guide = fitted(method, net, torch.randn(8, 1, dtype=torch.float64))
    x = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: guide.predictive(x).variance, (x,))
