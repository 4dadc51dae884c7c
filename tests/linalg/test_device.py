# SPDX-License-Identifier: Apache-2.0
"""Results live where the arguments live."""

import pytest
import torch

from pyro_dvi.linalg.lanczos import smallest_eigenpair, top_eigenpairs, trace_of_function
from pyro_dvi.linalg.minimise import minimise_newton
from pyro_dvi.linalg.operator import conjugate_gradients, gaussian_rows
from tests.linalg.matrices import rows, with_eigenvalues


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_follow_device_and_dtype(device, dtype):
    spectrum = torch.linspace(1, 30, 40, dtype=torch.float64)
    exact, _ = with_eigenvalues(spectrum)
    matrix = exact.to(device, dtype)
    b = rows(2, 40).to(matrix)
    close = {"rtol": 1e-3, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 1e-8, "atol": 1e-8}

    def operator(v):
        assert v.device == matrix.device and v.dtype == dtype
        return v @ matrix

    solution = conjugate_gradients(operator, b, tolerance=1e-6 if dtype == torch.float32 else 1e-12)
    torch.testing.assert_close(solution.x @ matrix, b, **close)
    top = top_eigenpairs(operator, matrix[0], 3, tolerance=1e-05)
    torch.testing.assert_close(top.values.cpu().double(), spectrum.flip(0)[:3], rtol=1e-5, atol=0)
    assert top.vectors.device == matrix.device and top.vectors.dtype == dtype
    lowest = smallest_eigenpair(operator, matrix[0])
    assert lowest.value == pytest.approx(1, rel=0.05) and lowest.vector.device == matrix.device
    estimate = trace_of_function(
        operator, matrix[0], torch.Generator().manual_seed(0), num_probes=50, steps=40
    ).log_determinant()
    assert (
        abs(estimate.value - float(spectrum.log().sum())) < 4 * estimate.standard_error
    )  # 1 in 16,000 seeds

    class Quadratic:
        def value_and_gradient(self, x):
            return 0.5 * x @ matrix @ x - b[0] @ x, matrix @ x - b[0]

        def product(self, x, vectors):
            return operator(vectors)

    found = minimise_newton(Quadratic(), torch.zeros_like(b[0]), tolerance=1e-8)
    torch.testing.assert_close(found.x @ matrix, b[0], rtol=1e-3, atol=1e-3)
    assert found.converged and found.x.device == matrix.device and found.x.dtype == dtype


def test_random_rows_of_a_seed_are_the_same_on_every_device(device):
    here, there = torch.empty(0), torch.empty(0, device=device)
    for make in (lambda: None, lambda: torch.Generator().manual_seed(3)):
        rows = gaussian_rows(3, 4, there, make())
        assert rows.device == device
        torch.testing.assert_close(rows.cpu(), gaussian_rows(3, 4, here, make()), rtol=0, atol=0)
    own = gaussian_rows(3, 4, there, torch.Generator(device).manual_seed(3))
    assert own.device == device and own.shape == (3, 4)
