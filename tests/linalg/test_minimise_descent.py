# SPDX-License-Identifier: Apache-2.0
"""Descent by gradients: minima that are known, what it costs, kinks and the rounding of values."""

import math

import pytest
import torch

from pyro_dvi.linalg.minimise import InMetric, descend
from tests.linalg.matrices import Root, rows, with_eigenvalues
from tests.linalg.test_minimise import Differentiated, double, quadratic, rosenbrock


def test_quadratic_function_in_the_metric_of_its_matrix_takes_one_step():
    matrix, _ = with_eigenvalues(torch.logspace(0, 6, 40, dtype=torch.float64))
    b = rows(1, 40)[0]
    problem = quadratic(matrix, b)
    local = InMetric(problem, Root(torch.linalg.cholesky(matrix).mT), torch.zeros_like(b))
    found = descend(local, torch.zeros_like(b), target=1e-16)
    torch.testing.assert_close(local.x(found.x), torch.linalg.solve(matrix, b), rtol=1e-6, atol=1e-9)
    assert found.steps == 1 and problem.evaluations == 2
    assert found.fallen == pytest.approx(-found.value, rel=1e-9)  # from zero


def test_rosenbrock():
    problem = Differentiated(rosenbrock)
    found = descend(problem, double(-1.2, 1.0), target=1e-16, max_steps=60)
    torch.testing.assert_close(found.x, double(1, 1), rtol=1e-6, atol=1e-6)
    assert problem.evaluations < 80 and not found.stuck
    assert found.fallen == pytest.approx(24.2, rel=1e-9)  # U at the start


def test_steps_are_counted_and_each_lowers_the_function():
    values = []
    found = descend(
        Differentiated(rosenbrock),
        double(-1.2, 1.0, -0.5),
        target=1e-30,
        max_steps=7,
        callback=lambda value, square: values.append((value, square)),
    )
    assert found.steps == len(values) == 7 and not found.stuck
    assert all(after[0] < before[0] for before, after in zip(values, values[1:], strict=False))
    assert values[-1][0] == found.value


def test_undefined_regions_are_avoided():
    found = descend(
        Differentiated(lambda x: (x - x.log()).sum()), double(30, 0.1), target=1e-16, max_steps=60
    )
    torch.testing.assert_close(found.x, double(1, 1), rtol=1e-6, atol=1e-6)


def test_kinks_end_the_search_at_the_best_point():
    start = double(0.3, -2.0)
    found = descend(Differentiated(lambda x: x.abs().sum() + 0.5 * x.square().sum()), start, target=1e-16)
    assert found.stuck or found.steps == 30
    assert found.value < 1e-2 and math.isfinite(found.value)


def test_slopes_decide_where_rounding_hides_the_values():
    matrix, _ = with_eigenvalues(torch.logspace(0, 1, 20, dtype=torch.float64))
    b = rows(1, 20)[0]
    single, offset = matrix.float(), 1e4  # one unit in the last place of U is 1e-3
    problem = Differentiated(lambda x: offset + 0.5 * x @ single @ x - b.float() @ x)
    found = descend(problem, torch.zeros(20), target=1e-8, max_steps=60)
    torch.testing.assert_close(found.x.double(), torch.linalg.solve(matrix, b), rtol=0, atol=1e-3)
    assert found.fallen == pytest.approx(float(0.5 * b @ torch.linalg.solve(matrix, b)), rel=1e-2)
