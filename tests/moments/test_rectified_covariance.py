# SPDX-License-Identifier: Apache-2.0
"""Covariances of rectified Gaussians, held against two-dimensional quadrature, closed forms and finite differences."""

import math

import pytest
import torch
from scipy import integrate, special

from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.piecewise import relu
from pyro_dvi.moments.rectified_covariance import _Pairs, rectified_covariance

pytestmark = pytest.mark.usefixtures("double")

MEANS = [(0.0, 0.0), (1.0, 1.0), (0.5, -0.3), (-2.0, 0.4), (3.0, 2.5), (-1.5, -1.4), (0.01, 0.0)]


def pairs(a, b, rho, dtype=torch.float64):
    """Means, variances and covariances of pairs of Gaussians of standard deviation one."""
    mu = torch.as_tensor([a, b], dtype=dtype)
    covariance = torch.eye(2, dtype=dtype) + rho * (1 - torch.eye(2, dtype=dtype))
    return mu, torch.ones_like(mu), covariance


def mean_of_relu(m, s):
    return m * special.ndtr(m / s) + s * math.exp(-0.5 * (m / s) ** 2) / math.sqrt(2 * math.pi)


def by_quadrature(a, b, rho):
    """Adaptive quadrature over the first Gaussian, of the exact mean of the second given the first."""
    s = math.sqrt(1 - rho**2)
    product, _ = integrate.quad(
        lambda z: (a + z) * math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi) * mean_of_relu(b + rho * z, s),
        -a,
        -a + 40,
        points=[-a + 1, -a + 3, -a + 6],
        epsabs=1e-13,
        epsrel=1e-13,
        limit=400,
    )
    return product - mean_of_relu(a, 1) * mean_of_relu(b, 1)


@pytest.mark.parametrize("rho", [0.0, 1e-6, 0.2, -0.5, 0.9, -0.9, 0.99, -0.99, 0.9999, -0.999999])
@pytest.mark.parametrize("means", MEANS)
def test_against_quadrature(means, rho):
    expected = by_quadrature(*means, rho)
    found = rectified_covariance(*pairs(*means, rho))[0, 1].item()
    assert found == pytest.approx(expected, abs=1e-12 if abs(rho) <= 0.9 else 2e-8)
    single = rectified_covariance(*pairs(*means, rho, torch.float32))[0, 1].item()
    assert single == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("means", MEANS)
def test_against_a_grid_in_two_dimensions(means):
    """Without any formula for a Gaussian: a fine grid of the density, whose error is that of the kinks."""
    rho, z = 0.6, torch.linspace(-9, 9, 2001)
    density = torch.exp(-0.5 * z.square())
    density = density / density.sum()
    x = (means[0] + z).clamp_min(0)
    y = (means[1] + rho * z[:, None] + math.sqrt(1 - rho**2) * z).clamp_min(0)
    product = density @ (x[:, None] * y) @ density
    expected = product - (density @ x) * (density @ y @ density)
    found = rectified_covariance(*pairs(*means, rho))[0, 1]
    assert abs(found - expected) < 2e-5


def test_closed_forms_at_the_edges():
    """Centred pairs have the arc-cosine kernel; at the correlations one and minus one there is one Gaussian only."""
    for rho in torch.linspace(-1, 1, 21).tolist():
        theta = math.acos(rho)
        kernel = (math.sin(theta) + (math.pi - theta) * math.cos(theta)) / (2 * math.pi)
        found = rectified_covariance(*pairs(0.0, 0.0, rho))[0, 1]
        assert float(found) == pytest.approx(kernel - 1 / (2 * math.pi), abs=1e-8)
    for mean in (-2.0, 0.0, 0.7, 5.0):
        one = relu(GaussianMoments(torch.tensor(mean), torch.tensor(1.0))).variance
        assert abs(rectified_covariance(*pairs(mean, mean, 1.0))[0, 1] - one) < 1e-8
        # relu(x) relu(-x) = 0
        product = mean_of_relu(mean, 1) * mean_of_relu(-mean, 1)
        assert float(rectified_covariance(*pairs(mean, -mean, -1.0))[0, 1]) == pytest.approx(
            -product, abs=1e-8
        )


def covariances(count=6, rank=6):
    root = torch.randn(3, count, rank, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.randn(
        3, count, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    ), root @ root.mT


def rectified(mu, variance, covariance):
    """The whole matrix, with the exact variances on its diagonal."""
    found = rectified_covariance(mu, variance, covariance)
    return found.diagonal_scatter(relu(GaussianMoments(mu, variance)).variance, dim1=-2, dim2=-1)


def test_slopes_are_those_of_finite_differences():
    mu, covariance = covariances()
    variance = covariance.diagonal(dim1=-2, dim2=-1).clone()
    leaves = [t.clone().requires_grad_() for t in (mu, variance, covariance)]
    assert torch.autograd.gradcheck(rectified, leaves)


def test_slope_in_the_covariance_is_the_probability_of_the_orthant():
    """Sheppard (1899) for means of zero; for others by Owen's function."""
    for a, b, rho in [
        (0.0, 0.0, 0.5),
        (0.0, 0.0, -0.8),
        (0.5, 1.2, 0.3),
        (-0.5, -1.2, 0.95),
        (0.4, 0.41, 0.9999),
    ]:
        mu, variance, covariance = pairs(a, b, rho)
        rectified_covariance(mu, variance, covariance.requires_grad_())[0, 1].backward()
        if a == b == 0:
            expected = 0.25 + math.asin(rho) / (2 * math.pi)
        else:
            s = math.sqrt(1 - rho**2)
            owen = special.owens_t(a, (b / a - rho) / s) + special.owens_t(b, (a / b - rho) / s)
            expected = 0.5 * (special.ndtr(a) + special.ndtr(b)) - owen
        assert float(covariance.grad[0, 1]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("rank", [1, 2, 6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_covariances_are_positive_semidefinite(dtype, rank):
    """Also where the units are functions of fewer Gaussians; up to the stated error."""
    mu, covariance = (t.to(dtype) for t in covariances(rank=rank))
    found = rectified(mu, covariance.diagonal(dim1=-2, dim2=-1), covariance)
    torch.testing.assert_close(found, found.mT)
    values = torch.linalg.eigvalsh(found.double())
    assert (values > -(1e-7 if dtype is torch.float64 else 1e-5) * values.amax(-1, keepdim=True)).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", ["certain", "one certain", "equal", "opposite", "far on", "far off", "tiny"])
def test_nothing_is_nan_at_the_edges(case, dtype):
    mean = {"far on": 1e4, "far off": -1e4}.get(case, 0.0)
    variance = {"certain": 0.0, "tiny": 1e-30}.get(case, 1.0)
    mu = torch.full((2,), mean, dtype=dtype, requires_grad=True)
    v = torch.tensor([variance, 0.0 if case == "one certain" else variance], dtype=dtype, requires_grad=True)
    rho = {"one certain": 0.0, "opposite": -1.0}.get(case, 1.0)
    covariance = torch.full((2, 2), rho * variance, dtype=dtype, requires_grad=True)
    found = rectified(mu, v, covariance)
    found.sum().backward()
    for tensor in (found, mu.grad, v.grad, covariance.grad):
        assert torch.isfinite(tensor).all()
    expected = {"certain": 0, "one certain": 0, "far on": 1, "far off": 0, "tiny": 0}
    if case in expected:
        assert float(found[0, 1].detach()) == pytest.approx(expected[case], abs=1e-6)


def test_independent_units_stay_independent():
    mu, covariance = covariances()
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    found = rectified(mu, variance, torch.diag_embed(variance))
    exact = relu(GaussianMoments(mu, variance)).variance
    assert torch.equal(found, torch.diag_embed(exact))


def test_integrals_converge_with_the_nodes():
    """The stated errors, over correlations up to the last digit and means that nearly agree."""
    generator = torch.Generator().manual_seed(0)
    a = 2 * torch.randn(400, generator=generator)
    b = a + 10.0 ** (-6 * torch.rand(400, generator=generator))
    rho = 1 - 10.0 ** (-12 * torch.rand(400, generator=generator))
    mu, variance = torch.stack([a, b], -1), torch.ones(400, 2)
    covariance = torch.diag_embed(variance) + rho[:, None, None] * (1 - torch.eye(2))
    first, second = (i[:, 0, 1] for i in _Pairs(mu, variance, covariance).integrals())
    s = ((1 - rho) * (1 + rho)).sqrt()
    u, v, r, root = (t.numpy() for t in (a, b, rho, s))
    owen = special.owens_t(u, (v - r * u) / (u * root)) + special.owens_t(v, (u - r * v) / (v * root))
    both = 0.5 * (special.ndtr(u) + special.ndtr(v)) - owen - 0.5 * (u * v < 0)
    excess = torch.from_numpy(both - special.ndtr(u) * special.ndtr(v))
    assert (second - excess).abs().max() < 1e-5
    assert (first >= 0).all()


def test_the_closed_form_of_the_paper_is_an_approximation():
    """Wu et al. (2019): the two leading terms of an asymptotic series. It is off by .013 in units of deviations."""
    line, correlations = torch.linspace(-4, 4, 41), torch.linspace(-0.999, 0.999, 100)
    a, b, rho = (t.flatten() for t in torch.meshgrid(line, line, correlations, indexing="ij"))
    root = 1 + (1 - rho.square()).sqrt()
    angle = rho.asin() - rho / root
    exponent = (a * a + b * b) * rho / (2 * angle * root) - (rho.asin() - rho) / (angle * rho) * a * b
    more = angle / (2 * math.pi) * torch.exp(-exponent)
    printed = rho * (torch.special.ndtr(a) * torch.special.ndtr(b) + more)
    covariance = torch.eye(2) + rho[:, None, None] * (1 - torch.eye(2))
    mu = torch.stack([a, b], -1)
    exact = rectified_covariance(mu, torch.ones_like(mu), covariance)[:, 0, 1]
    error = (printed - exact).abs()
    assert 0.012 < error.max() < 0.014
    assert error[rho.abs() < 0.9].max() < 0.004
