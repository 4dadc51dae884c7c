# SPDX-License-Identifier: Apache-2.0
"""A prior variance in closed form, against minimisation over it and against the linear model with a known evidence."""

import math

import pyro.distributions as dist
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.stats import kstest, t as student
from torch import Tensor, nn
from torch.distributions import kl_divergence

import pyro_dvi as dvi
from pyro_dvi.bayesian import OptimalScale
from pyro_dvi.curvature import GGNDiagonal
from pyro_dvi.gaussians.normals import MultiplicativeNormal, total_correlation
from pyro_dvi.gaussians.optimal_scale import OptimalScaleNormal
from pyro_dvi.runs.divergences import kl_to_priors
from pyro_dvi.runs.latents import GaussianSite, Latent

ALPHA, BETA = torch.tensor(1.3, dtype=torch.float64), torch.tensor(0.7, dtype=torch.float64)
PRIOR = OptimalScaleNormal(ALPHA, BETA, (2, 3))
LOC = torch.tensor([[0.7, -1.3, 0.0], [2.0, 0.04, -0.5]], dtype=torch.float64)
SCALE = torch.tensor([[0.1, 0.6, 1.7], [0.3, 0.01, 0.5]], dtype=torch.float64)


def objective(variance: Tensor, loc: Tensor = LOC, scale: Tensor = SCALE) -> Tensor:
    """KL(q || N(0, variance)) - log InvGamma(variance) as torch and Pyro compute it."""
    divergence = kl_divergence(dist.Normal(loc, scale), dist.Normal(torch.zeros_like(loc), variance.sqrt()))
    return divergence.sum() - dist.InverseGamma(ALPHA, BETA).log_prob(variance)


def latent(q: dist.Normal, prior: OptimalScaleNormal = PRIOR, **options) -> Latent:
    return Latent("w", prior, q.loc, q.loc, source=GaussianSite("w", q.loc, q), **options)


def test_the_closed_form_is_the_minimum_over_the_variance():
    found = minimize_scalar(
        lambda log: objective(torch.tensor(log).exp()).item(), bracket=(-3.0, 3.0), tol=1e-12
    )
    best = PRIOR.optimal_variance(LOC, SCALE)
    assert best.item() == pytest.approx(math.exp(found.x), rel=1e-6)
    variance = best.clone().requires_grad_()
    (slope,) = torch.autograd.grad(objective(variance), variance)
    assert abs(slope) < 1e-12
    kl = kl_to_priors([latent(dist.Normal(LOC, SCALE))])
    assert kl.item() == pytest.approx(found.fun, abs=1e-10)
    torch.testing.assert_close(kl, objective(best))


def test_gradients_are_those_at_the_fixed_optimum_and_through_it():
    found = []
    for form in ("closed", "through", "fixed"):
        leaves = LOC.clone().requires_grad_(), SCALE.clone().requires_grad_()
        variance = (leaves[0].square().sum() + leaves[1].square().sum() + 2 * BETA) / (6 + 2 * ALPHA + 2)
        if form == "closed":
            loss = kl_to_priors([latent(dist.Normal(*leaves))])
        else:
            loss = objective(variance if form == "through" else variance.detach(), *leaves)
        found.append(torch.autograd.grad(loss, leaves))
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[0], found[2])


def test_multiplicative_noise_and_covariances():
    noisy = MultiplicativeNormal(LOC, torch.tensor([[0.05, 0.6, 1.7]], dtype=torch.float64), 1e-4)
    plain = dist.Normal(LOC, noisy.scale)
    torch.testing.assert_close(kl_to_priors([latent(noisy)]), kl_to_priors([latent(plain)]))

    q = dist.MultivariateNormal(torch.zeros(2), torch.tensor([[1.0, 0.6], [0.6, 1.0]]))
    prior = OptimalScaleNormal(ALPHA.float(), BETA.float(), (2,))
    source = GaussianSite("w", q.loc, q)
    joint = Latent("w", prior, q.loc, q.loc, source=source, shared=object())  # type: ignore[arg-type]
    alone = Latent("w", prior, q.loc, q.loc, own_scale=torch.ones(2), source=None)
    torch.testing.assert_close(kl_to_priors([joint]), kl_to_priors([alone]) + total_correlation(q))


def test_each_batch_has_a_variance_of_its_own_and_its_own_scale_and_mask():
    loc, scale = torch.stack([LOC, 3 * LOC]), torch.stack([SCALE, 2 * SCALE])
    both = PRIOR.expand((2,))
    apart = torch.stack([kl_to_priors([latent(dist.Normal(m, s))]) for m, s in zip(loc, scale, strict=True)])
    q = dist.Normal(loc, scale)
    torch.testing.assert_close(kl_to_priors([latent(q, both)]), apart.sum())
    torch.testing.assert_close(kl_to_priors([latent(q, both.to_event(1))]), apart.sum())
    weights = torch.tensor([0.5, 3.0], dtype=torch.float64)
    weighted = latent(q, both, plate_scale=weights, guide_scale=weights)
    torch.testing.assert_close(kl_to_priors([weighted]), weights @ apart)
    torch.testing.assert_close(kl_to_priors([latent(q, both, mask=torch.tensor([False, True]))]), apart[1])


def test_log_prob_is_the_joint_density_at_the_optimum_and_the_limit_of_narrow_posteriors():
    variance = PRIOR.optimal_variance(LOC, torch.zeros_like(LOC))
    joint = dist.InverseGamma(ALPHA, BETA).log_prob(variance)
    joint = joint + dist.Normal(0.0, variance.sqrt()).log_prob(LOC).sum()
    torch.testing.assert_close(PRIOR.log_prob(LOC), joint)
    torch.testing.assert_close(kl_to_priors([Latent("w", PRIOR, LOC)]), -joint)
    narrow = dist.Normal(LOC, torch.full_like(LOC, 1e-7))
    kl = kl_to_priors([latent(narrow)]) + narrow.entropy().sum()
    torch.testing.assert_close(kl, -joint)


def test_draws_are_student_t_and_share_a_variance():
    """Kolmogorov and Smirnov's test, and a z-test of dependence, at a false-alarm rate of 1e-4 each."""
    torch.manual_seed(0)
    draws = OptimalScaleNormal(torch.tensor(2.5), torch.tensor(4.0), (2, 3)).sample((4000,))
    assert draws.shape == (4000, 2, 3) and not draws.requires_grad
    t = student(df=5.0, scale=math.sqrt(4.0 / 2.5))
    assert kstest(draws[:, 0, 0].numpy(), t.cdf).pvalue > 1e-4
    logs = draws.square().log()[:, 0, :2]
    assert torch.corrcoef(logs.T)[0, 1] * 4000**0.5 > 3.9
    beta = torch.tensor(4.0, requires_grad=True)
    OptimalScaleNormal(torch.tensor(2.5), beta, (3,)).rsample((2,)).square().sum().backward()
    assert beta.grad is not None and beta.grad > 0


def test_the_optimum_of_a_linear_model_maximises_evidence_times_hyperprior(double):
    """With orthogonal inputs the exact posterior is factorised, so that nothing is lost."""
    torch.manual_seed(0)
    x = torch.linalg.qr(torch.randn(30, 4)).Q * torch.tensor([9.0, 5.0, 2.0, 0.5])
    y, noise, hyper = x @ torch.tensor([1.0, -0.6, 0.3, 2.0]) + 0.4 * torch.randn(30), 0.4, OptimalScale(0.7)
    net = dvi.to_bayesian_(nn.Linear(4, 1, bias=False), prior_scale=hyper)
    model = dvi.regressor(net, num_data=30, noise_scale=noise)
    alpha, beta = hyper.alpha, (hyper.alpha + 1) * 0.7**2

    def minus_log_joint(log: float) -> float:
        variance = torch.tensor(log).exp()
        covariance = variance * x @ x.T + noise**2 * torch.eye(30)
        evidence = dist.MultivariateNormal(torch.zeros(30), covariance).log_prob(y)
        hyperprior = dist.InverseGamma(torch.tensor(alpha), torch.tensor(beta)).log_prob(variance)
        return -(evidence + hyperprior).item()

    found = minimize_scalar(minus_log_joint, bracket=(-3.0, 3.0), tol=1e-12)
    precision = math.exp(-found.x) + x.square().sum(0) / noise**2
    mean, scale = (x.T @ y) / noise**2 / precision, precision.rsqrt()
    guide = dvi.MeanFieldGuide(model)
    guide(x, y)
    with torch.no_grad():
        guide.locs.net.weight_unconstrained.copy_(mean.reshape(1, 4))
        guide.scales.net.weight_unconstrained.copy_(scale.log().reshape(1, 4))
    for elbo in (
        dvi.TaylorELBO(curvature=GGNDiagonal()),
        dvi.MomentPropagationELBO(),
        dvi.MomentPropagationELBO(full_covariance=True),
    ):
        loss = elbo.differentiable_loss(model, guide, x, y)
        assert loss.item() == pytest.approx(found.fun, abs=1e-9)
        for slope in torch.autograd.grad(loss, list(guide.parameters())):
            assert slope.abs().max() < 1e-5  # as exact as the search over the variance
