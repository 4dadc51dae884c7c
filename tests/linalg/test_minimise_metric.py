# SPDX-License-Identifier: Apache-2.0
"""A function in the coordinates of a metric: against the chain rule with dense matrices."""

import torch

from pyro_dvi.linalg.minimise import InMetric
from tests.linalg.matrices import Root, rows, with_eigenvalues

MATRIX, _ = with_eigenvalues(torch.logspace(0, 3, 12, dtype=torch.float64))
FACTOR = torch.linalg.cholesky(MATRIX)


class Quartic:
    """x'Ax / 2 + sum x^4 / 4."""

    def value_and_gradient(self, x):
        return 0.5 * x @ MATRIX @ x + x.pow(4).sum() / 4, MATRIX @ x + x**3

    def product(self, x, vectors):
        return vectors @ MATRIX + 3 * x.square() * vectors


def test_derivatives_obey_the_chain_rule():
    root = FACTOR.mT
    metric = Root(root)
    origin, y = rows(2, 12, seed=1)
    local, inverse = InMetric(Quartic(), metric, origin), torch.linalg.inv(root)
    x = origin + inverse @ y
    torch.testing.assert_close(local.x(y), x, rtol=1e-12, atol=1e-12)
    value, gradient = local.value_and_gradient(y)
    expected = Quartic().value_and_gradient(x)
    torch.testing.assert_close(
        (value, gradient), (expected[0], inverse.mT @ expected[1]), rtol=1e-10, atol=1e-10
    )
    hessian = MATRIX + (3 * x.square()).diag()
    eye = torch.eye(12, dtype=torch.float64)
    torch.testing.assert_close(local.product(y, eye), inverse.mT @ hessian @ inverse, rtol=1e-10, atol=1e-10)
