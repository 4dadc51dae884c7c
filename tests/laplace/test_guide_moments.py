# SPDX-License-Identifier: Apache-2.0
"""A diagonal Gaussian predicts by moments, in one pass: against closed forms, and draws of the weights."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import pyro_dvi as dvi
from pyro_dvi.errors import DviWarning, GuideError
from pyro_dvi.laplace import Dense, Diagonal, KroneckerFactored
from tests.laplace.problems import LinearRegression, guide_at

pytestmark = pytest.mark.filterwarnings("ignore:the variances of a Laplace posterior")

X = torch.tensor([[-1.0, 0.5], [-0.3, 1.0], [0.4, -0.8], [1.2, 0.1]], dtype=torch.float64)
Y = torch.tensor([0.3, -0.2, 0.5, 0.9], dtype=torch.float64)


def network(outputs: int = 1) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, outputs)).double()
    return dvi.to_bayesian_(net, prior_scale=1.0)


def fitted(model: Any, y: Tensor = Y, **options: Any) -> dvi.LaplaceGuide:
    guide = dvi.LaplaceGuide(model)
    guide.fit([(X, y)], Diagonal(), unconverged="accept", **options)
    return guide


def drawn(guide: dvi.LaplaceGuide, count: int) -> dict[str, Tensor]:
    """Independent weights, from the precision's diagonal."""
    generator = torch.Generator().manual_seed(1)
    scale = guide.posterior.precision.rsqrt()
    flat = guide.posterior.mode + scale * torch.randn(
        count, len(scale), dtype=scale.dtype, generator=generator
    )
    return guide.fitted.layout.named(flat)


def outputs(w: dict[str, Tensor]) -> Tensor:
    """Outputs ``[draws, rows, K]`` of the network, written out."""
    hidden = torch.tanh(X @ w["net.0.weight"].mT + w["net.0.bias"].unsqueeze(-2))
    return hidden @ w["net.2.weight"].mT + w["net.2.bias"].unsqueeze(-2)


def test_a_linear_model_has_its_closed_form():
    problem = LinearRegression()
    guide = guide_at(problem.model, problem.batches[0], {"weight": problem.mode()})
    guide.fit(problem.batches, Diagonal())
    found = dvi.predict(problem.model, guide, problem.x, dvi.Moments())
    torch.testing.assert_close(found.mean, problem.x @ problem.mode())
    epistemic = problem.x.square() @ (1 / problem.precision().diagonal())
    torch.testing.assert_close(found.variance, epistemic + problem.noise**2)
    linearised = dvi.predict(problem.model, guide, problem.x)
    torch.testing.assert_close(found.variance, linearised.variance)


def test_one_hidden_layer_has_the_moments_of_its_draws():
    # Rate of false alarms with another seed: eight two-sided tests at 4.5 standard errors, 5e-5.
    model = dvi.regressor(network(), num_data=4, noise_scale=0.5)
    guide = fitted(model)
    with pytest.warns(DviWarning, match=r"can be far too wide.*Linearised\(\)"):
        found = dvi.predict(model, guide, X, dvi.Moments())
    f = outputs(drawn(guide, 40_000)).squeeze(-1)
    deviation = f - f.mean(0)
    variance, fourth = deviation.square().mean(0), deviation.pow(4).mean(0)
    assert ((found.mean - f.mean(0)) / (variance / len(f)).sqrt()).abs().max() < 4.5
    error = ((fourth - variance.square()) / len(f)).sqrt()
    assert ((found.variance - 0.25 - variance) / error).abs().max() < 4.5
    linearised = dvi.predict(model, guide, X).variance
    assert ((linearised - 0.25 - variance) / error).abs().max() > 30  # another model: the tangent at the mode


def test_class_probabilities_are_those_of_draws():
    # 12 probabilities; the propagated logits are Gaussian and independent, which costs up to 0.01 here.
    model = dvi.classifier(network(3), num_data=4)
    guide = fitted(model, torch.tensor([0, 1, 2, 0]))
    found = dvi.predict(model, guide, X, dvi.Moments()).probabilities
    expected = outputs(drawn(guide, 40_000)).softmax(-1).mean(0)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.01)


def test_a_positive_latent_is_log_normal():
    def model(x: Tensor, y: Tensor | None = None) -> Tensor:
        noise = pyro.sample("noise", dist.LogNormal(x.new_zeros(()), 0.5))
        slope = pyro.sample("slope", dist.Normal(x.new_zeros(()), 1.0))
        with pyro.plate("data", 4, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(slope * x[:, 0], noise), obs=y)

    guide = fitted(model)
    mode, variance = (
        guide.unconstrained_mode(),
        guide.fitted.layout.named(guide.posterior.marginal_variance()),
    )
    found = dvi.predict(model, guide, X, dvi.Moments())
    aleatoric = (2 * mode["noise"] + 2 * variance["noise"]).exp()  # E exp(2 u)
    torch.testing.assert_close(found.variance, X[:, 0].square() * variance["slope"] + aleatoric)


def test_sites_outside_the_subset_are_certain():
    model = dvi.regressor(network(), num_data=4, noise_scale=0.5)
    guide = fitted(model, subset="net.2.*")
    w = guide.unconstrained_mode()
    hidden = torch.tanh(X @ w["net.0.weight"].mT + w["net.0.bias"])
    features = torch.cat([hidden, torch.ones(4, 1, dtype=hidden.dtype)], 1)
    precision = features.square().sum(0) / 0.25 + 1
    found = dvi.predict(model, guide, X, dvi.Moments())
    torch.testing.assert_close(found.variance, features.square() @ (1 / precision) + 0.25)


def test_a_loaded_guide_predicts_the_same(tmp_path):
    model = dvi.regressor(network(), num_data=4, noise_scale=0.5)
    guide = fitted(model)
    before = dvi.predict(model, guide, X, dvi.Moments()).variance
    pyro.clear_param_store()
    loaded = dvi.LaplaceGuide(model)
    loaded.load_state_dict(guide.state_dict())
    assert torch.equal(dvi.predict(model, loaded, X, dvi.Moments()).variance, before)


def test_other_gaussians_are_refused_with_the_way_out():
    model = dvi.regressor(network(), num_data=4, noise_scale=0.5)
    guide = dvi.LaplaceGuide(model)
    guide.initialize(X, Y)
    with pytest.raises(GuideError, match="no Gaussian"):
        dvi.predict(model, guide, X, dvi.Moments())
    for method in (Dense(), KroneckerFactored()):
        guide.fit([(X, Y)], method, unconverged="accept")
        with pytest.raises(
            GuideError, match=r"LaplaceGuide is not a factorised Gaussian.*Linearised\(\).*Diagonal\(\)"
        ):
            dvi.predict(model, guide, X, dvi.Moments())
    guide.fit([(X, Y)], Diagonal(), unconverged="accept")
    with torch.no_grad():
        getattr(guide.locs.net, "2").bias.add_(0.1)
    with pytest.raises(GuideError, match="has moved"):
        dvi.predict(model, guide, X, dvi.Moments())
