# SPDX-License-Identifier: Apache-2.0
"""KL divergences against numerical integration on a dense grid, and against long sampling where there is no grid."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, distributions as td
from torch.distributions import ComposeTransform, ExpTransform, biject_to

from pyro_dvi.errors import DataError
from pyro_dvi.gaussians.normals import MultiplicativeNormal
from pyro_dvi.runs import divergences
from pyro_dvi.runs.divergences import kl_to_priors, prior_precision
from pyro_dvi.runs.latents import GaussianSite, Latent, unconstraining_transform

D = 3
LOC = torch.tensor([-0.4, 0.2, 0.9], dtype=torch.float64)
SCALE = torch.tensor([0.05, 0.4, 1.1], dtype=torch.float64)


def latent(prior: Any, loc: Tensor | None = LOC, scale: Tensor | None = SCALE, **options: Any) -> Latent:
    transform = options.pop("transform", unconstraining_transform(prior.support))
    value = loc if transform is None or loc is None else transform(loc)
    source = None if loc is None or scale is None else GaussianSite("z", loc, td.Normal(loc, scale))
    scale_of_both = options.get("plate_scale", 1.0)
    defaults = {"log_density": 0.0, "plate_scale": 1.0, "mask": None, "guide_scale": scale_of_both}
    return Latent(
        "z",
        prior,
        options.pop("value", value),
        loc,
        scale,
        transform,
        source=source,
        **{**defaults, **options},
    )


def by_grid(prior: Any, loc: Tensor, scale: Tensor) -> Tensor:
    """Elementwise KL by the trapezoidal rule over +-12 standard deviations."""
    transform = biject_to(prior.support)
    t = torch.linspace(-12, 12, 24001, dtype=loc.dtype)[:, None]
    u = loc + scale * t
    weight = torch.exp(-0.5 * t**2)
    weight = weight / weight.sum()
    value = transform(u)
    log_p = prior.log_prob(value) + transform.log_abs_det_jacobian(u, value)
    log_q = dist.Normal(loc, scale).log_prob(u)
    return (weight * (log_q - log_p)).sum(0)


def full(value: float) -> Tensor:
    return torch.full((D,), value, dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    name: str
    prior: Callable[[], Any]
    tolerance: float = 1e-6


FACTORISED = [
    Case("Normal", lambda: dist.Normal(full(0.3), full(0.8)), 1e-10),
    Case("LogNormal", lambda: dist.LogNormal(full(0.3), full(0.8)), 1e-10),
    Case("HalfNormal", lambda: dist.HalfNormal(full(0.7))),
    Case("HalfCauchy", lambda: dist.HalfCauchy(full(0.7)), 1e-4),
    Case("Gamma", lambda: dist.Gamma(full(2.0), full(1.5))),
    Case("InverseGamma", lambda: dist.InverseGamma(full(2.0), full(1.5))),
    Case("Exponential", lambda: dist.Exponential(full(1.5))),
    Case("Beta", lambda: dist.Beta(full(2.0), full(0.7)), 1e-5),
    Case("Uniform", lambda: dist.Uniform(full(-1.0), full(2.0)), 1e-5),
    Case("StudentT", lambda: dist.StudentT(3.0, full(0.2), full(0.5)), 1e-3),
    Case("Cauchy", lambda: dist.Cauchy(full(0.2), full(0.5)), 5e-3),
    Case("Laplace", lambda: dist.Laplace(full(0.2), full(0.5)), 2e-2),
    Case("Gumbel", lambda: dist.Gumbel(full(0.2), full(0.5))),
]
every_factorised = pytest.mark.parametrize("case", FACTORISED, ids=lambda c: c.name)


@every_factorised
@pytest.mark.parametrize("event", [False, True])
def test_factorised_priors(case, event):
    prior = case.prior()
    exact = by_grid(prior, LOC, SCALE).sum()
    kl = kl_to_priors([latent(prior.to_event(1) if event else prior)])
    assert kl.shape == ()
    torch.testing.assert_close(kl, exact, atol=case.tolerance, rtol=case.tolerance)


@every_factorised
def test_scale_and_mask_of_the_site_apply(case):
    prior = case.prior()
    keep = torch.tensor([True, False, True])
    exact = by_grid(prior, LOC, SCALE)
    kl = kl_to_priors([latent(prior, plate_scale=2.5, mask=keep)])
    torch.testing.assert_close(kl, 2.5 * exact[keep].sum(), atol=3 * case.tolerance, rtol=case.tolerance)
    weights = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)
    kl = kl_to_priors([latent(prior, plate_scale=weights)])
    torch.testing.assert_close(kl, (weights * exact).sum(), atol=3 * case.tolerance, rtol=case.tolerance)
    assert kl_to_priors([latent(prior, mask=False)]) == 0
    torch.testing.assert_close(kl_to_priors([latent(prior, mask=True)]), kl_to_priors([latent(prior)]))
    # A mask on a site whose dimension is an event leaves out whole rows.
    rows = latent(
        prior.expand([2, D]).to_event(1),
        LOC.expand(2, D),
        SCALE.expand(2, D),
        mask=torch.tensor([True, False]),
    )
    torch.testing.assert_close(
        kl_to_priors([rows]), exact.sum(), atol=3 * case.tolerance, rtol=case.tolerance
    )


@every_factorised
def test_gradients_are_those_of_the_grid(case):
    def gradients(divergence: Callable[[Tensor, Tensor], Tensor]) -> tuple:
        loc, scale = LOC.clone().requires_grad_(), SCALE.clone().requires_grad_()
        return torch.autograd.grad(divergence(loc, scale), (loc, scale))

    prior = case.prior()
    ours = gradients(lambda loc, scale: kl_to_priors([latent(prior, loc, scale)]))
    exact = gradients(lambda loc, scale: by_grid(prior, loc, scale).sum())
    # Quadrature of a kink is right on average; its derivative is rougher.
    tolerance = 0.15 if case.name == "Laplace" else 10 * case.tolerance
    torch.testing.assert_close(ours, exact, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("scalar_prior", [True, False])
@pytest.mark.parametrize("shared_scale", [True, False])
def test_fused_normal_divergence_has_the_right_gradient(scalar_prior, shared_scale):
    prior_scale = torch.tensor(0.8, dtype=torch.float64)
    prior = dist.Normal(torch.zeros((), dtype=torch.float64), prior_scale).expand([D])
    if not scalar_prior:
        prior = dist.Normal(full(0.1), torch.tensor([0.3, 0.8, 2.0], dtype=torch.float64))
    loc, scale = LOC.clone().requires_grad_(), (SCALE[:1] if shared_scale else SCALE).clone().requires_grad_()

    def divergence(loc: Tensor, scale: Tensor) -> Tensor:
        return kl_to_priors([latent(prior, loc, scale, plate_scale=1.7)])

    assert torch.autograd.gradcheck(divergence, (loc, scale))
    exact = torch.distributions.kl_divergence(dist.Normal(loc, scale), prior).sum() * 1.7
    torch.testing.assert_close(divergence(loc, scale), exact)


def test_learned_prior_parameters_have_gradients():
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    centre = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)

    def divergence(centre: Tensor, scale: Tensor) -> Tensor:
        return kl_to_priors([latent(dist.Normal(centre, scale).expand([D]).to_event(1))])

    assert torch.autograd.gradcheck(divergence, (centre, scale))


def test_transformed_normal_priors_are_closed_form(monkeypatch):
    monkeypatch.setattr(divergences, "_expectation", lambda *_: pytest.fail("quadrature"))
    base = dist.Normal(full(0.3), full(0.8))
    for prior in (
        dist.LogNormal(full(0.3), full(0.8)),
        dist.TransformedDistribution(base, [ExpTransform()]),
        dist.LogNormal(full(0.3), full(0.8)).to_event(1),
    ):
        torch.testing.assert_close(
            kl_to_priors([latent(prior)]), by_grid(base, LOC, SCALE).sum(), atol=1e-10, rtol=1e-10
        )
        transform = ComposeTransform([ExpTransform()])  # as a hand-written LogNormal guide has it
        torch.testing.assert_close(
            kl_to_priors([latent(prior, transform=transform)]),
            kl_to_priors([latent(prior)]),
            atol=1e-10,
            rtol=1e-10,
        )


def test_another_transform_than_the_priors_is_integrated():
    """A softplus posterior under a LogNormal prior."""
    prior = dist.LogNormal(full(0.3), full(0.8))
    transform = torch.distributions.transforms.SoftplusTransform()
    t = torch.linspace(-12, 12, 24001, dtype=torch.float64)[:, None]
    weight = torch.exp(-0.5 * t**2) / torch.exp(-0.5 * t**2).sum()
    loc, scale = LOC + 1, 0.4 * SCALE
    u = loc + scale * t
    log_p = prior.log_prob(transform(u)) + transform.log_abs_det_jacobian(u, transform(u))
    exact = (weight * (dist.Normal(loc, scale).log_prob(u) - log_p)).sum()
    torch.testing.assert_close(
        kl_to_priors([latent(prior, loc, scale, transform=transform)]), exact, atol=1e-5, rtol=1e-5
    )


def _sampled_kl(prior: Any, loc: Tensor, scale: Tensor, count: int) -> Tensor:
    """Plain Monte-Carlo draws of log q - log p in unconstrained space."""
    transform = biject_to(prior.support)
    u = loc + scale * torch.randn(count, *loc.shape, dtype=loc.dtype)
    value = transform(u)
    jacobian = transform.log_abs_det_jacobian(u, value)
    log_p = prior.log_prob(value) + jacobian.reshape(count, -1).sum(1)
    return dist.Normal(loc, scale).to_event(1).log_prob(u) - log_p


JOINT = {
    "Dirichlet": (lambda: dist.Dirichlet(torch.tensor([1.5, 0.8, 2.0], dtype=torch.float64)), 2),
    "MultivariateNormal": (
        lambda: dist.MultivariateNormal(full(0.1), torch.eye(D, dtype=torch.float64) * 0.5 + 0.3),
        3,
    ),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("make, size", JOINT.values(), ids=JOINT)
def test_joint_priors_by_sampling(make, size):
    """Two-sample z-test at 4: false alarm about once in 16,000 seeds."""
    prior, loc, scale = make(), LOC[:size], 0.5 * SCALE[:size]
    ours = torch.stack([kl_to_priors([latent(prior, loc, scale)]) for _ in range(1500)])
    exact = _sampled_kl(prior, loc, scale, 100_000)
    error = (ours.var() / len(ours) + exact.var() / len(exact)).sqrt()
    assert abs((ours.mean() - exact.mean()) / error) < 4


def test_point_masses_contribute_minus_their_log_prior():
    prior = dist.Gamma(full(2.0), full(1.5))
    value = LOC.exp()
    kl = kl_to_priors([latent(prior, None, None, value=value, log_density=-LOC)])
    torch.testing.assert_close(kl, (-LOC - prior.log_prob(value)).sum())
    kl = kl_to_priors(
        [latent(prior, None, None, value=value, plate_scale=2.0, mask=torch.tensor([True, False, False]))]
    )
    torch.testing.assert_close(kl, -2 * prior.log_prob(value)[0])


def test_a_value_outside_the_prior_is_named():
    prior = dist.Gamma(full(2.0), full(1.5), validate_args=True)
    with pytest.raises(DataError, match="prior of site 'z'"):
        kl_to_priors([latent(prior, None, None, value=-LOC.exp())])


def test_prior_precision():
    assert prior_precision(latent(dist.Normal(0.0, 0.5).expand([D]))) == pytest.approx(4.0)
    assert prior_precision(latent(dist.LogNormal(full(0.0), full(0.5)))) is not None
    assert prior_precision(latent(dist.Gamma(full(2.0), full(1.5)))) is None


def test_single_precision():
    for case in FACTORISED:
        prior = case.prior()
        exact = kl_to_priors([latent(prior)])
        parameters = {k: getattr(prior, k).float() for k in prior.arg_constraints if hasattr(prior, k)}
        parameters.pop("probs", None), parameters.pop("logits", None)
        single = kl_to_priors([latent(type(prior)(**parameters), LOC.float(), SCALE.float())])
        assert single.dtype == torch.float32
        assert single.item() == pytest.approx(exact.item(), rel=1e-4), case.name


# A scale in the model only --------------------------------------------------------------------------------------


PRIORS = {
    "normal": dist.Normal(0.3, 2.0),
    "lognormal": dist.LogNormal(0.3, 2.0),
    "gamma": dist.Gamma(torch.tensor(2.0, dtype=torch.float64), 1.5),
}


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS)
def test_each_density_has_the_scale_of_its_own_site(prior, as_tensor):
    """As in Pyro's Trace_ELBO: E_q[c_q log q - c_p log p], on a dense grid."""
    transform = biject_to(prior.support)
    t = torch.linspace(-12, 12, 24001, dtype=torch.float64)[:, None]
    weight = torch.exp(-0.5 * t**2) / torch.exp(-0.5 * t**2).sum()
    u = LOC + SCALE * t
    value = transform(u)
    log_q = dist.Normal(LOC, SCALE).log_prob(u) - transform.log_abs_det_jacobian(u, value)
    expected = (weight * (0.5 * log_q - 3.0 * prior.log_prob(value))).sum()
    scales = [torch.tensor(c, dtype=torch.float64) if as_tensor else c for c in (3.0, 0.5)]
    site = latent(prior.expand([D]), plate_scale=scales[0], guide_scale=scales[1])
    torch.testing.assert_close(kl_to_priors([site]), expected, rtol=1e-6, atol=1e-6)


def test_a_point_mass_has_its_jacobian_at_the_scale_of_the_guide():
    value, log_density = LOC.exp(), -LOC
    prior = dist.LogNormal(0.3, 2.0).expand([D])
    site = latent(prior, None, None, value=value, log_density=log_density, plate_scale=3.0, guide_scale=0.5)
    expected = (0.5 * log_density - 3.0 * prior.log_prob(value)).sum()
    torch.testing.assert_close(kl_to_priors([site]), expected)


# Many sites ----------------------------------------------------------------------------------------------------


def test_sites_of_all_kinds_are_summed():
    """Those that are summed together, and those that are not, each as it is alone."""
    row = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    noise = MultiplicativeNormal(LOC, row, 0.01)
    sites = [
        latent(dist.Normal(0.3, 2.0).expand([D])),
        latent(dist.Normal(full(0.3), SCALE + 1).to_event(1)),
        latent(dist.Normal(0.3, 2.0).expand([D]), plate_scale=2.5),
        latent(dist.Normal(0.3, 2.0).expand([D]), mask=torch.tensor([True, False, True])),
        latent(dist.LogNormal(full(0.3), full(0.8))),
        latent(dist.Gamma(full(2.0), full(1.5))),
        latent(dist.Normal(0.3, 2.0).expand([D]), None, None, value=LOC, log_density=LOC),
        latent(dist.Normal(0.3, 2.0).expand([D]), None, None, value=LOC, plate_scale=2.0),
        latent(dist.Normal(0.0, 2.0).expand([D])),
    ]
    sites[-1].source, sites[-1].own_scale = GaussianSite("z", LOC, noise), None
    alone = torch.stack([kl_to_priors([site]) for site in sites])
    torch.testing.assert_close(kl_to_priors(sites), alone.sum())
    closed = torch.distributions.kl_divergence
    normal = dist.Normal(full(0.3), full(2.0))
    torch.testing.assert_close(alone[0], closed(dist.Normal(LOC, SCALE), normal).sum())
    torch.testing.assert_close(alone[2], 2.5 * alone[0])
    torch.testing.assert_close(alone[6], (LOC - normal.log_prob(LOC)).sum())
    torch.testing.assert_close(alone[7], -2 * normal.log_prob(LOC).sum())
    torch.testing.assert_close(
        alone[8], closed(dist.Normal(LOC, noise.scale), dist.Normal(full(0.0), 2.0)).sum()
    )
    assert kl_to_priors([]) == 0


def test_a_scale_that_the_prior_learns_has_the_gradient_of_all_sites():
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    each = torch.tensor([0.3, 0.8, 2.0], dtype=torch.float64, requires_grad=True)

    def divergence(scale: Tensor, each: Tensor) -> Tensor:
        shared = dist.Normal(scale.new_zeros(()), scale)
        sites = [
            latent(shared.expand([D])),
            latent(shared.expand([D]).to_event(1), plate_scale=1.7),
            latent(shared.expand([2, D]), LOC.expand(2, D), SCALE.expand(2, D)),
            latent(shared.expand([D]), None, None, value=LOC),
            latent(dist.Normal(full(0.2), each)),
        ]
        return kl_to_priors(sites)

    assert torch.autograd.gradcheck(divergence, (scale, each))


def test_a_prior_that_was_detached_is_not_moved():
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    prior = dist.Normal(torch.zeros_like(scale), scale.detach()).expand([D])
    assert not kl_to_priors([latent(prior)]).requires_grad
