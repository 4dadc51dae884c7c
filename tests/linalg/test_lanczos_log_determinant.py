# SPDX-License-Identifier: Apache-2.0
"""Stochastic Lanczos quadrature against exact log determinants and traces."""

import math
from importlib import import_module

import pytest
import torch

from pyro_dvi.errors import ArgumentError, NotPositiveDefiniteError
from pyro_dvi.linalg.lanczos import SpectralQuadrature, trace_of_function
from tests.linalg.matrices import Counting, with_eigenvalues

SPECTRUM = torch.logspace(-1, 2, 60, dtype=torch.float64)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_enough_steps_leave_only_the_spread_of_the_probes():
    """With steps = dim each probe gives its quadratic form exactly."""
    matrix, vectors = with_eigenvalues(SPECTRUM)
    quadrature = trace_of_function(
        lambda v: v @ matrix, torch.zeros(60, dtype=torch.float64), seeded(1), num_probes=3, steps=60
    )
    estimate = quadrature.log_determinant()
    signs = torch.randint(2, (3, 60), generator=seeded(1), dtype=torch.float64) * 2 - 1
    forms = ((signs @ vectors.T) ** 2 * SPECTRUM.log()).sum(-1)
    assert estimate.value == pytest.approx(float(forms.mean()), abs=1e-9)
    assert estimate.standard_error == pytest.approx(float(forms.std() / math.sqrt(3)), abs=1e-9)


def test_within_its_standard_errors():
    """The z-scores of 40 seeds have mean 0 and deviation 1: |mean| below 4/sqrt(40) fails once in 16,000 times."""
    matrix, _ = with_eigenvalues(SPECTRUM)
    exact = float(SPECTRUM.log().sum())
    scores = []
    for seed in range(40):
        estimate = trace_of_function(
            lambda v: v @ matrix, torch.zeros(60, dtype=torch.float64), seeded(seed), num_probes=30, steps=30
        ).log_determinant()
        scores.append((estimate.value - exact) / estimate.standard_error)
    z = torch.tensor(scores)
    assert abs(float(z.mean())) < 4 / math.sqrt(40)
    assert 0.6 < float(z.std()) < 1.5  # chi-squared with 39 degrees of freedom: beyond 1 in 10,000


def test_diagonal_matrix_is_exact_with_one_probe():
    estimate = trace_of_function(
        lambda v: v * SPECTRUM,
        torch.zeros(60, dtype=torch.float64),
        torch.Generator(),
        num_probes=1,
        steps=60,
    ).log_determinant()
    assert estimate.value == pytest.approx(float(SPECTRUM.log().sum()), abs=1e-9)
    assert math.isnan(estimate.standard_error)


def test_shifts_need_no_application_and_equal_the_shifted_matrix():
    eigenvalues = torch.cat([torch.zeros(40, dtype=torch.float64), SPECTRUM[:20] * 50])
    matrix, _ = with_eigenvalues(eigenvalues)
    operator = Counting(matrix)
    quadrature = trace_of_function(
        operator, torch.zeros(60, dtype=torch.float64), seeded(2), num_probes=4, steps=60
    )
    applied = operator.vectors
    for c in (0.1, 1.0, 30.0):
        direct = trace_of_function(
            lambda v, c=c: v @ matrix + c * v,
            torch.zeros(60, dtype=torch.float64),
            seeded(2),
            num_probes=4,
            steps=60,
        ).log_determinant()
        shifted = quadrature.log_determinant(c)
        assert shifted.value == pytest.approx(direct.value, rel=1e-8)
        assert shifted.standard_error == pytest.approx(direct.standard_error, rel=1e-6)
        exact = float((eigenvalues + c).log().sum())
        assert abs(shifted.value - exact) < 5 * shifted.standard_error
    assert operator.vectors == applied


def test_common_multiplier_of_a_prior():
    generator = seeded(5)
    jacobian = torch.randn(10, 25, generator=generator, dtype=torch.float64)
    prior = torch.rand(25, generator=generator, dtype=torch.float64) + 0.5
    scaled = jacobian / prior.sqrt()
    quadrature = trace_of_function(
        lambda v: v @ scaled.T @ scaled,
        torch.zeros(25, dtype=torch.float64),
        generator,
        num_probes=200,
        steps=25,
    )
    for c in (0.3, 1.0, 7.0):
        exact = float(torch.logdet(jacobian.T @ jacobian + c * prior.diag()))
        found = quadrature.log_determinant(c)
        assert (
            abs(found.value + float(prior.log().sum()) - exact) < 4 * found.standard_error
        )  # 1 in 16,000 each


def test_trace_of_other_functions():
    matrix, _ = with_eigenvalues(SPECTRUM)
    quadrature = trace_of_function(
        lambda v: v @ matrix, torch.zeros(60, dtype=torch.float64), seeded(3), num_probes=100, steps=40
    )
    torch.testing.assert_close(quadrature.weights.sum(-1), torch.ones(100, dtype=torch.float64))
    for function in (torch.sqrt, torch.square, torch.ones_like, lambda x: 1 / (1 + x)):
        estimate = quadrature.trace(function)
        exact = float(function(SPECTRUM).sum())
        assert abs(estimate.value - exact) <= 4 * estimate.standard_error + 1e-8 * exact


def test_spaces_that_end_early():
    quadrature = trace_of_function(
        lambda v: 3 * v, torch.zeros(5), torch.Generator(), num_probes=4, steps=5
    )  # every probe is an eigenvector
    estimate = quadrature.log_determinant()
    assert estimate.value == pytest.approx(5 * math.log(3), rel=1e-6) and estimate.standard_error < 1e-6
    mixed = torch.tensor([[0.0, 1.0], [1.0, 0.0]])  # eigenvectors (1, 1) and (1, -1), values 1 and -1
    quadrature = trace_of_function(lambda v: v @ mixed, torch.zeros(2), seeded(0), num_probes=50, steps=2)
    assert quadrature.nodes.abs().max() <= 1 + 1e-6
    assert (
        abs(quadrature.trace(torch.exp).value - 2 * math.cosh(1))
        < 4 * quadrature.trace(torch.exp).standard_error
    )


def test_float32_one_dimension_and_log_of_what_is_not_positive():
    matrix, _ = with_eigenvalues(SPECTRUM)
    single = trace_of_function(
        lambda v: v @ matrix.float(), torch.zeros(60), seeded(4), num_probes=5, steps=40
    ).log_determinant()
    exact = float(SPECTRUM.log().sum())
    assert (
        abs(single.value - exact) < 5 * single.standard_error
    )  # t with 4 degrees of freedom: 1 in 130 seeds
    assert trace_of_function(
        lambda v: 2 * v, torch.zeros(1), torch.Generator(), num_probes=1
    ).log_determinant().value == pytest.approx(math.log(2), rel=1e-6)
    indefinite, _ = with_eigenvalues(SPECTRUM - 1)
    quadrature = trace_of_function(
        lambda v: v @ indefinite, torch.zeros(60, dtype=torch.float64), torch.Generator()
    )
    with pytest.raises(NotPositiveDefiniteError, match="eigenvalue") as caught:
        quadrature.log_determinant()
    assert caught.value.curvature < 0
    assert math.isfinite(quadrature.log_determinant(1.0).value)
    with pytest.raises(ArgumentError, match="num_probes"):
        trace_of_function(lambda v: v, torch.zeros(3), torch.Generator(), num_probes=0)


def test_probes_one_after_the_other_give_what_they_give_together(monkeypatch: pytest.MonkeyPatch) -> None:
    diagonal = torch.linspace(1, 4, 40, dtype=torch.float64)

    def quadrature() -> SpectralQuadrature:
        return trace_of_function(lambda v: v * diagonal, diagonal, seeded(1), num_probes=5, steps=10)

    together = quadrature()
    monkeypatch.setattr(import_module("pyro_dvi.linalg.lanczos"), "_BASIS_BYTES", 1)
    found = quadrature()
    torch.testing.assert_close((found.nodes, found.weights), (together.nodes, together.weights))
