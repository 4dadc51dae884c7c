# SPDX-License-Identifier: Apache-2.0
"""Sums over many sites against Pyro's elementwise divergences, with gradients by finite differences."""

from collections.abc import Callable
from typing import Any

import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributions import kl_divergence
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_dvi.gaussians.normal_divergence import (
    minus_log_density,
    multiplicative_divergence,
    normal_divergence,
)
from pyro_dvi.gaussians.normals import MultiplicativeNormal
from pyro_dvi.runs.divergences import kl_to_priors
from pyro_dvi.runs.latents import GaussianSite, Latent

SHAPES = [(3,), (2, 3), (), (1, 2, 2)]


def tensors(low: float, high: float, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.empty(shape, dtype=dtype).uniform_(low, high).requires_grad_() for shape in SHAPES]


def priors() -> tuple[list[Tensor], list[Tensor]]:
    """A mean, which is fixed, and a deviation for each site."""
    locs, scales = tensors(-1, 1), tensors(0.5, 2)
    return [each.mean().detach() for each in locs], [each.mean().detach().requires_grad_() for each in scales]


def normals(prior_locs: list[Tensor], prior_scales: list[Tensor]) -> list[dist.Normal]:
    parts = zip(prior_locs, prior_scales, SHAPES, strict=True)
    return [dist.Normal(m.expand(shape), s.expand(shape)) for m, s, shape in parts]


def check(ours: Callable[..., Tensor], plain: Callable[..., Tensor], *lists: list[Tensor]) -> None:
    """Values and gradients of all that have some."""
    inputs = [each for part in lists for each in part if each.requires_grad]
    torch.testing.assert_close(ours(*lists), plain(*lists))
    # by a factor, as a KL weight has
    found, expected = (torch.autograd.grad(1.7 * f(*lists), inputs) for f in (ours, plain))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("exponential", [False, True])
def test_gaussians_of_many_sites(exponential):
    torch.manual_seed(0)

    def plain(locs: list[Tensor], spreads: list[Tensor], *prior: Any) -> Tensor:
        posteriors = [dist.Normal(loc, scale(r)) for loc, r in zip(locs, spreads, strict=True)]
        return sum(kl_divergence(q, p).sum() for q, p in zip(posteriors, normals(*prior), strict=True))

    def ours(locs: list[Tensor], spreads: list[Tensor], *prior: Any) -> Tensor:
        return normal_divergence(locs, [scale(r) for r in spreads], *prior)

    scale = torch.exp if exponential else torch.abs
    check(ours, plain, tensors(-2, 2), tensors(0.1, 1), *priors())


def test_the_logarithm_of_a_scale_is_not_taken_where_it_is_known():
    class Logs(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += str(func).startswith("aten.log.")
            return func(*args, **(kwargs or {}))

    rhos, one = tensors(-2, 0), [torch.ones(()).double()] * len(SHAPES)
    taken = []
    for scales in ([r.exp() for r in rhos], [(2 * r).exp() for r in rhos], [r.exp().detach() for r in rhos]):
        with Logs() as logs:
            value = normal_divergence(tensors(-1, 1), scales, [0 * s for s in one], one)
        assert torch.isfinite(value)
        taken.append(logs.calls)
    assert taken == [1, 1 + len(SHAPES), 1 + len(SHAPES)]  # one for those of the priors


def test_point_masses_of_many_sites():
    torch.manual_seed(1)

    def plain(values: list[Tensor], *prior: Any) -> Tensor:
        return -sum(p.log_prob(v).sum() for v, p in zip(values, normals(*prior), strict=True))

    check(minus_log_density, plain, tensors(-2, 2), *priors())


def test_multiplicative_noise_of_many_sites():
    torch.manual_seed(2)
    eps = [0.01, 0.1, 0.02, 0.03]

    def plain(locs: list[Tensor], alphas: list[Tensor], *prior: Any) -> Tensor:
        posteriors = [
            dist.Normal(m, (a * m**2 + e).sqrt()) for m, a, e in zip(locs, alphas, eps, strict=True)
        ]
        return sum(kl_divergence(q, p).sum() for q, p in zip(posteriors, normals(*prior), strict=True))

    def ours(locs: list[Tensor], alphas: list[Tensor], *prior: Any) -> Tensor:
        return multiplicative_divergence(locs, alphas, eps, *prior)

    alphas = [torch.rand(shape, dtype=torch.float64) for shape in [(1,), (1, 3), (), (2, 1)]]
    check(ours, plain, tensors(-2, 2), [alpha.requires_grad_() for alpha in alphas], *priors())


@pytest.mark.parametrize("constant", [0, 1])
def test_constants_get_no_gradient(constant):
    lists = [tensors(-1, 1), tensors(0.1, 1)]
    lists[constant] = [each.detach() for each in lists[constant]]
    one = [torch.ones(())] * len(SHAPES)
    for divergence in (
        lambda locs, spreads: normal_divergence(locs, spreads, one, one),
        lambda locs, spreads: multiplicative_divergence(locs, spreads, [1e-8] * len(SHAPES), one, one),
    ):
        grads = torch.autograd.grad(divergence(*lists), lists[1 - constant])
        assert all(torch.isfinite(g).all() and g.abs().sum() > 0 for g in grads)
        assert not divergence(*([each.detach() for each in part] for part in lists)).requires_grad


@pytest.mark.parametrize("spread", [1e-3, 1.0])
def test_gaussians_in_single_precision(spread):
    """With a prior in double precision, as a number that a model writes down may be."""
    torch.manual_seed(3)
    loc, scale = torch.randn(300, 200).double(), spread * (torch.rand(300, 200).double() + 0.1)
    m, s = torch.tensor(0.2).double(), torch.tensor(0.7).double()
    results = []
    for dtype, prior_dtype in (
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.float32, torch.float64),
    ):
        x, y = loc.to(dtype).requires_grad_(), scale.to(dtype).requires_grad_()
        total = normal_divergence([x], [y], [m.to(prior_dtype)], [s.to(prior_dtype)])
        results.append((total.detach(), *torch.autograd.grad(total, (x, y))))
    for single in results[1:]:
        assert single[1].dtype == single[2].dtype == torch.float32
        for exact, value in zip(results[0], single, strict=True):
            torch.testing.assert_close(value.double(), exact, rtol=2e-6, atol=2e-6)


def test_priors_may_be_numbers_on_the_cpu():
    """As a model writes them down whose weights are elsewhere; no GPU is needed to see the devices of results."""
    with FakeTensorMode():
        locs, spreads = ([torch.rand(3, 2, device="cuda"), torch.rand(2, device="cuda")] for _ in range(2))
        prior = [torch.zeros(())] * 2, [torch.ones(())] * 2
        totals = [
            normal_divergence(locs, spreads, *prior),
            minus_log_density(locs, *prior),
            multiplicative_divergence(locs, spreads, [1e-8] * 2, *prior),
        ]
    assert all(total.device.type == "cuda" for total in totals)


# One site of multiplicative noise ----------------------------------------------------------------------------------

LOC = torch.tensor([[0.7, -1.3, 0.0], [2.0, 0.04, -0.5]], dtype=torch.float64)
ALPHA = torch.tensor([[0.05, 0.6, 1.7]], dtype=torch.float64)
EPS = 1e-4


def posterior() -> MultiplicativeNormal:
    return MultiplicativeNormal(LOC, ALPHA, EPS)


def divergence_from_normal(q: MultiplicativeNormal, prior_loc: Tensor, prior_scale: Tensor) -> Tensor:
    if prior_scale.dim() == 0:
        return multiplicative_divergence([q.loc], [q.alpha], [q.eps], [prior_loc], [prior_scale])
    prior = dist.Normal(prior_loc.expand(2, 3), prior_scale.expand(2, 3))
    site = GaussianSite("w", q.loc, q)
    return kl_to_priors([Latent("w", prior, q.loc, q.loc, q.scale, source=site)])


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
    expected = kl_divergence(dist.Normal(q.loc, q.scale), p)
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


def test_millions_of_weights_in_single_precision():
    torch.manual_seed(0)
    scale = torch.rand(1500, 2, 700) + 1
    zero, one = torch.zeros(()), torch.ones(())
    exact = normal_divergence([scale.double()], [scale.double()], [zero.double()], [one.double()])
    single = normal_divergence([scale], [scale], [zero], [one])
    assert single.item() == pytest.approx(exact.item(), rel=1e-6)
