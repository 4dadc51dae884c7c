# SPDX-License-Identifier: Apache-2.0
"""Multiplicative noise against the Normal of the same mean and variance, and against numerical integration."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import TraceMeanField_ELBO
from torch import Tensor
from torch.distributions import kl_divergence

from pyro_dvi.divergences import kl_to_prior
from pyro_dvi.errors import ArgumentError
from pyro_dvi.handlers.distributions import strip_event_dims
from pyro_dvi.handlers.latents import GaussianSite, Latent
from pyro_dvi.multiplicative_normal import MultiplicativeNormal, divergence_from_normal

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
    "alpha, eps, message",
    [
        (torch.ones(2, 1, 1), 1e-8, "broadcast"),
        (torch.ones(1, 2), 1e-8, r"\(1, 2\)"),
        (ALPHA, 0.0, "eps"),
        (ALPHA, -1.0, "eps"),
        (ALPHA, float("nan"), "eps"),
    ],
)
def test_bad_arguments(alpha, eps, message):
    with pytest.raises(ArgumentError, match=message):
        MultiplicativeNormal(LOC, alpha, eps)


@pytest.mark.parametrize(
    "loc, alpha", [(LOC, -ALPHA), (LOC, ALPHA * float("nan")), (LOC * float("nan"), ALPHA)]
)
def test_values_are_checked_where_validation_is_on(loc, alpha):
    with pytest.raises(ValueError, match="MultiplicativeNormal"):
        MultiplicativeNormal(loc, alpha, validate_args=True)
    assert torch.isnan(MultiplicativeNormal(loc, alpha, validate_args=False).scale).any()


# Divergence ----------------------------------------------------------------------------------------------------

PRIORS = {
    "scalar": (torch.tensor(0.0).double(), torch.tensor(0.8).double()),
    "shifted": (torch.tensor(0.3).double(), torch.tensor(2.0).double()),
    "per weight": (LOC.flip(0) / 2, LOC.abs() + 0.3),
    "per row": (torch.tensor([[0.1], [0.2]]).double(), torch.tensor([[0.5], [1.5]]).double()),
}


@pytest.mark.parametrize("prior", PRIORS)
def test_divergence_is_that_of_the_normal(prior):
    loc, scale = PRIORS[prior]
    q, p = posterior(), dist.Normal(loc.expand(2, 3), scale.expand(2, 3))
    expected = kl_divergence(plain(q), p)
    torch.testing.assert_close(divergence_from_normal(q, loc, scale), expected.sum())
    torch.testing.assert_close(kl_divergence(q, p), expected)
    torch.testing.assert_close(kl_divergence(q.to_event(2), p.to_event(2)), expected.sum())


def test_divergence_by_integration():
    """Trapezoidal rule over 14 standard deviations either side."""
    q = posterior()
    p = dist.Normal(torch.tensor(0.3).double(), torch.tensor(0.8).double())
    t = torch.linspace(-14, 14, 40001, dtype=torch.float64)[:, None, None]
    w = q.loc + q.scale * t
    log_q = q.log_prob(w)
    integral = torch.trapezoid(log_q.exp() * (log_q - p.log_prob(w)), w, dim=0)
    torch.testing.assert_close(integral.sum(), divergence_from_normal(q, p.loc, p.scale), rtol=1e-9, atol=0)


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("shape", [(1, 3), (2, 1), (3,), (2, 3), ()])
def test_gradients_of_the_divergence(prior, shape):
    alpha = (0.3 + torch.rand(shape, dtype=torch.float64)).requires_grad_()
    loc = LOC.clone().requires_grad_()
    value = lambda m, a: divergence_from_normal(MultiplicativeNormal(m, a, 0.01), *PRIORS[prior])  # noqa: E731
    assert torch.autograd.gradcheck(value, (loc, alpha))
    elementwise = kl_divergence(
        MultiplicativeNormal(loc, alpha, 0.01), dist.Normal(*(p.expand(2, 3) for p in PRIORS[prior]))
    )
    expected = torch.autograd.grad(elementwise.sum(), (loc, alpha))
    torch.testing.assert_close(torch.autograd.grad(value(loc, alpha), (loc, alpha)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_weight_of_zero_has_a_finite_divergence_and_no_slope(dtype):
    loc = torch.tensor([[0.0, 1e-30, 1e-6]], dtype=dtype, requires_grad=True)
    alpha = torch.tensor([[0.05, 0.0, 1e-20]], dtype=dtype, requires_grad=True)
    prior = (torch.zeros((), dtype=dtype), torch.ones((), dtype=dtype))
    for total in (
        divergence_from_normal(MultiplicativeNormal(loc, alpha), *prior),
        kl_divergence(MultiplicativeNormal(loc, alpha), dist.Normal(*(p.expand(1, 3) for p in prior))).sum(),
    ):
        d_loc, d_alpha = torch.autograd.grad(total, (loc, alpha))
        assert torch.isfinite(total) and torch.isfinite(d_loc).all() and torch.isfinite(d_alpha).all()
        assert d_loc[0, 0] == 0


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_single_precision(scale):
    torch.manual_seed(1)
    loc, alpha = scale * torch.randn(300, 200).double(), torch.rand(1, 200).double() + 1e-3
    s = torch.tensor(0.7 * scale).double()
    results = []
    for dtype in (torch.float64, torch.float32):
        m, a = loc.to(dtype).requires_grad_(), alpha.to(dtype).requires_grad_()
        total = divergence_from_normal(
            MultiplicativeNormal(m, a, 1e-8 * scale**2), s.new_zeros(()).to(dtype), s.to(dtype)
        )
        results.append((total.detach(), *torch.autograd.grad(total, (m, a))))
    for exact, single in zip(*results, strict=True):
        assert single.dtype == torch.float32
        error = (single.double() - exact).abs()
        assert (error <= 1e-4 * exact.abs().clamp_min(exact.abs().mean() * 1e-2)).all()


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
    divergence = kl_to_prior(latent(q, p, True, **options))
    torch.testing.assert_close(divergence, kl_to_prior(latent(q, p, False, **options)))
    if not options:
        torch.testing.assert_close(divergence, kl_divergence(plain(q), p).sum())


def test_other_priors_are_integrated():
    q, p = posterior(), dist.Laplace(torch.zeros(2, 3).double(), 1.0)
    torch.testing.assert_close(kl_to_prior(latent(q, p, True)), kl_to_prior(latent(q, p, False)))


def test_mean_field_elbo_of_pyro_has_the_closed_form():
    """Nothing is left to sampling when the likelihood is constant."""

    def model() -> None:
        pyro.sample("w", dist.Normal(torch.zeros(2, 3).double(), 0.8).to_event(2))

    def guide() -> None:
        pyro.sample("w", posterior().to_event(2))

    losses = {TraceMeanField_ELBO().loss(model, guide) for _ in range(3)}
    expected: Tensor = kl_divergence(plain(posterior()), dist.Normal(torch.zeros(2, 3).double(), 0.8)).sum()
    assert len(losses) == 1 and losses.pop() == pytest.approx(expected.item())
