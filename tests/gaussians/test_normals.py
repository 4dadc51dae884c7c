# SPDX-License-Identifier: Apache-2.0
"""Multiplicative noise against the Normal of the same mean and variance, and against numerical integration."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import TraceMeanField_ELBO
from torch import Tensor
from torch.distributions import kl_divergence

from pyro_dvi.core.distributions import strip_event_dims
from pyro_dvi.gaussians.normals import MultiplicativeNormal
from pyro_dvi.runs.divergences import kl_to_priors
from pyro_dvi.runs.latents import GaussianSite, Latent

LOC = torch.tensor([[0.7, -1.3, 0.0], [2.0, 0.04, -0.5]], dtype=torch.float64)
ALPHA = torch.tensor([[0.05, 0.6, 1.7]], dtype=torch.float64)
EPS = 1e-4


def posterior(dtype: torch.dtype = torch.float64) -> MultiplicativeNormal:
    return MultiplicativeNormal(LOC.to(dtype), ALPHA.to(dtype), EPS)


def plain(q: MultiplicativeNormal) -> dist.Normal:
    return dist.Normal(q.loc, (q.alpha * q.loc**2 + q.eps).sqrt())


# As a distribution ---------------------------------------------------------------------------------------------


def test_is_the_normal_of_its_mean_and_variance():
    q, p = posterior(), plain(posterior())
    x = torch.linspace(-2, 2, 6, dtype=torch.float64).view(2, 3)
    for read in (
        lambda d: d.mean, lambda d: d.variance, lambda d: d.stddev, lambda d: d.log_prob(x), lambda d: d.entropy(),
        lambda d: d.cdf(x), lambda d: d.icdf(torch.full_like(x, 0.3)), lambda d: d.mode,
    ):  # fmt: skip
        torch.testing.assert_close(read(q), read(p))
    assert q.batch_shape == (2, 3) and q.event_shape == () and q.has_rsample


def test_draws_have_its_moments_and_carry_gradients():
    """Tests of the mean and of the variance of each of six weights at z = 4."""
    torch.manual_seed(0)
    n = 20000
    loc, alpha = LOC.clone().requires_grad_(), ALPHA.clone().requires_grad_()
    q = MultiplicativeNormal(loc, alpha, EPS)
    draws = q.rsample((n,))
    z = (draws.mean(0) - LOC) / (q.scale / n**0.5)
    assert (z.abs() < 4).all()
    assert ((draws.var(0) / q.variance - 1).abs() < 4 * (2 / n) ** 0.5).all()
    draws.sum().backward()
    assert torch.isfinite(loc.grad).all() and torch.isfinite(alpha.grad).all()
    assert not q.sample().requires_grad


@pytest.mark.parametrize("shape", [(2, 3), (5, 2, 3)])
def test_expanding_keeps_alpha(shape):
    q = posterior().expand(shape)
    assert isinstance(q, MultiplicativeNormal) and q.batch_shape == shape
    assert q.alpha.shape == (1, 3) and q.eps == EPS
    torch.testing.assert_close(q.scale, plain(posterior()).scale.expand(shape))
    assert q.rsample().shape == shape
    inner = strip_event_dims(posterior().to_event(2).expand((7,)))
    assert isinstance(inner, MultiplicativeNormal) and inner.alpha.shape == (1, 3)
    assert inner.loc.shape == (7, 2, 3)


def test_a_plate_leaves_alpha_as_it_is():
    def guide():
        with pyro.plate("nets", 4):
            pyro.sample("w", posterior().to_event(2))

    fn = pyro.poutine.trace(guide).get_trace().nodes["w"]["fn"]
    assert strip_event_dims(fn).alpha.shape == (1, 3) and fn.batch_shape == (4,)


@pytest.mark.parametrize(
    "loc, alpha", [(LOC, -ALPHA), (LOC, ALPHA * float("nan")), (LOC * float("nan"), ALPHA)]
)
def test_values_are_checked_where_validation_is_on(loc, alpha):
    with pytest.raises(ValueError, match="MultiplicativeNormal"):
        MultiplicativeNormal(loc, alpha, validate_args=True)
    assert torch.isnan(MultiplicativeNormal(loc, alpha, validate_args=False).scale).any()


# In objectives -------------------------------------------------------------------------------------------------


def latent(q: MultiplicativeNormal, prior: dist.Normal, noise: bool, **options: object) -> Latent:
    source = GaussianSite("w", q.loc, q if noise else plain(q))
    settings: dict = {"plate_scale": 1.0, "mask": None, **options}
    settings["guide_scale"] = settings["plate_scale"]
    return Latent("w", prior, q.loc, q.loc, q.scale, None, 0.0, source=source, **settings)


def learned() -> dist.Normal:
    return dist.Normal(torch.zeros(()).double(), torch.tensor(0.8).double().requires_grad_()).expand((2, 3))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"plate_scale": 2.5},
        {"plate_scale": torch.tensor(2.5).double()},
        {"mask": torch.tensor([[True], [False]])},
        {"mask": False},
    ],
)
@pytest.mark.parametrize("prior", [lambda: dist.Normal(0.0, 0.8).expand((2, 3)), learned])
def test_the_divergence_of_a_site_keeps_its_scale_and_mask(options, prior):
    p = prior()
    p = dist.Normal(p.loc.double(), p.scale.double())
    q = posterior()
    divergence = kl_to_priors([latent(q, p, True, **options)])
    torch.testing.assert_close(divergence, kl_to_priors([latent(q, p, False, **options)]))
    if not options:
        torch.testing.assert_close(divergence, kl_divergence(plain(q), p).sum())


def test_other_priors_are_integrated():
    q, p = posterior(), dist.Laplace(torch.zeros(2, 3).double(), 1.0)
    torch.testing.assert_close(kl_to_priors([latent(q, p, True)]), kl_to_priors([latent(q, p, False)]))


def test_mean_field_elbo_of_pyro_has_the_closed_form():
    """Nothing is left to sampling when the likelihood is constant."""

    def model() -> None:
        pyro.sample("w", dist.Normal(torch.zeros(2, 3).double(), 0.8).to_event(2))

    def guide() -> None:
        pyro.sample("w", posterior().to_event(2))

    losses = {TraceMeanField_ELBO().loss(model, guide) for _ in range(3)}
    expected: Tensor = kl_divergence(plain(posterior()), dist.Normal(torch.zeros(2, 3).double(), 0.8)).sum()
    assert len(losses) == 1 and losses.pop() == pytest.approx(expected.item())
