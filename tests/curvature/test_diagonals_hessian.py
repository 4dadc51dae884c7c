# SPDX-License-Identifier: Apache-2.0
"""The Hessian's diagonal against dense torch.func matrices, its clamp, and when it gives up."""

from collections.abc import Callable

import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_dvi.curvature import HessianDiagonal, Linearisation
from pyro_dvi.curvature.linearisation import ObservedSite

X = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
Y = torch.tensor([0.0, 1, 1, 0, 1, 0], dtype=torch.float64)
Z = torch.linspace(-1, 2, 6, dtype=torch.float64)
SCALES = [
    torch.tensor([[0.1, 0.3], [0.2, 0.5], [0.4, 0.1]], dtype=torch.float64),
    torch.tensor([0.3, 0.6], dtype=torch.float64),
]


def log_likelihood(v: Tensor, w: Tensor) -> Tensor:
    """Two observed sites with different scales around a small network."""
    sites = observed(v, w)
    return 2.0 * sites[0].fn.log_prob(sites[0].value).sum() + 0.5 * sites[1].fn.log_prob(sites[1].value).sum()


def observed(v: Tensor, w: Tensor) -> list[ObservedSite]:
    h = torch.tanh(X @ v)
    return [
        ObservedSite("label", dist.Bernoulli(logits=2 * h @ w, validate_args=False), Y, 2.0),
        ObservedSite("level", dist.StudentT(3.0, (h * w).sum(1), 0.5, validate_args=False), Z, 0.5),
    ]


def values() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = ((3, 2), (2,))
    return [torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes]


def linearisation(v: Tensor, w: Tensor, limit: float | None = None) -> Linearisation:
    limits: Callable[[], list[Tensor | None]] = lambda: [None if limit is None else torch.tensor(limit)] * 2  # noqa: E731
    return Linearisation(["v", "w"], [v, w], SCALES, observed(v, w), precision_limits=limits)


def dense_diagonals(v: Tensor, w: Tensor) -> list[Tensor]:
    flat = torch.cat([v.reshape(-1), w])
    hessian = torch.autograd.functional.hessian(lambda t: log_likelihood(t[:6].view(3, 2), t[6:]), flat)
    return [-hessian.diagonal()[:6].view(3, 2), -hessian.diagonal()[6:]]


def test_exact_diagonal_is_that_of_the_dense_hessian():
    v, w = values()
    penalty = HessianDiagonal().penalty(linearisation(v, w, limit=1e6))
    expected = sum((0.5 * s**2 * c).sum() for s, c in zip(SCALES, dense_diagonals(v, w), strict=True))
    torch.testing.assert_close(penalty, expected, rtol=1e-10, atol=1e-10)


def test_gradient_of_the_penalty_in_means_and_scales():
    v, w = values()

    def penalty(v: Tensor, w: Tensor, s: Tensor) -> Tensor:
        likelihood = linearisation(v.view_as(v), w.view_as(w), limit=1e6)
        likelihood.scales = [s, SCALES[1]]
        return HessianDiagonal().penalty(likelihood)

    assert torch.autograd.gradcheck(penalty, (v, w, SCALES[0].clone().requires_grad_()))


def test_entries_without_an_optimal_variance_are_replaced_and_no_others():
    v, w = values()
    diagonals = dense_diagonals(v, w)
    assert any(bool(((-1.0 < c) & (c < -0.5)).any()) for c in diagonals), "negative, with an optimal variance"
    assert any(bool((c < -1.0).any()) for c in diagonals), "negative, without one"
    for limit, margin, replaced in ((1.0, 0.9, -0.9), (1.0, 0.5, -0.5), (None, 0.9, 0.0)):
        penalty = HessianDiagonal(margin=margin).penalty(linearisation(v, w, limit))
        expected = sum(
            (0.5 * s**2 * torch.where(c > -(limit or 0.0), c, replaced)).sum()
            for s, c in zip(SCALES, diagonals, strict=True)
        )
        torch.testing.assert_close(penalty, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("fraction", [-0.97, -0.5, 0.0, 3.0])
def test_the_objective_of_eq_20_has_its_optimum_at_the_closed_form(fraction):
    """A quadratic log-likelihood with h at a fraction of β/s², below the margin too: σ² = β / (β/s² + h)."""
    limit, kl_weight = 2.0, 0.5
    u = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    log_density = -0.5 * fraction * limit * u**2
    site = ObservedSite("y", dist.Delta(torch.zeros(3), log_density=log_density), torch.zeros(3))
    optimum = (kl_weight / (limit + fraction * limit)) ** 0.5
    scale = torch.full((3,), optimum, dtype=torch.float64, requires_grad=True)
    penalty = HessianDiagonal().penalty(
        Linearisation(["u"], [u], [scale], [site], lambda: [torch.full((3,), limit)])
    )
    torch.testing.assert_close(penalty, (0.5 * scale**2 * fraction * limit).sum())
    kl = 0.5 * scale**2 * limit / kl_weight - scale.log()  # up to a constant
    (slope,) = torch.autograd.grad(penalty + kl_weight * kl.sum(), scale)
    torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0, atol=1e-12)


def test_hutchinson_is_unbiased():
    """z-test at 4 on the unclamped penalty: false alarm about once in 16,000 seeds."""
    v, w = values()
    curvature = HessianDiagonal(num_probes=1)
    likelihood = linearisation(v, w, limit=1e6)
    draws = torch.stack([curvature.penalty(likelihood).detach() for _ in range(300)])
    exact = HessianDiagonal().penalty(likelihood).detach()
    assert draws.std() > 0
    assert abs((draws.mean() - exact) / (draws.std() / len(draws) ** 0.5)) < 4


def test_probes_average():
    v, w = values()
    likelihood = linearisation(v, w, limit=1e6)
    curvatures = [HessianDiagonal(num_probes=n) for n in (1, 16)]
    one, many = (torch.stack([c.penalty(likelihood).detach() for _ in range(40)]).std() for c in curvatures)
    assert many < one / 2.5


def test_a_linear_log_likelihood_has_no_curvature():
    u = torch.ones(2, dtype=torch.float64, requires_grad=True)
    site = ObservedSite("y", dist.Delta(torch.zeros(2), log_density=u), torch.zeros(2))
    penalty = HessianDiagonal().penalty(Linearisation(["u"], [u], [torch.ones(2)], [site], lambda: [None]))
    assert penalty == 0


def test_repr():
    assert repr(HessianDiagonal()) == "HessianDiagonal()"
    assert repr(HessianDiagonal(num_probes=3)) == "HessianDiagonal(num_probes=3)"
