# SPDX-License-Identifier: Apache-2.0
"""Rows of the Jacobian and the Gauss-Newton matrix from gradients of single examples, against dense autograd."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.curvature import example_gradients
from pyro_dvi.curvature.example_gradients import ExampleGradients, add_gauss_newton_matrix
from pyro_dvi.curvature.squared_gradients import SquaredGradients
from pyro_dvi.errors import DviWarning
from tests.curvature.per_example_cases import CASES, M

# An even kernel pads one side more than the other.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding=.same.:UserWarning")


def of_case(case) -> ExampleGradients:
    x, weights = case.inputs()
    recorder = SquaredGradients(weights)
    with recorder:
        first = case.call(x, *weights)
    weighted = torch.linspace(0.5, 1.5, 2 * M, dtype=torch.float64).reshape(M, 2)
    return ExampleGradients(recorder, torch.stack([first, first.square().sin()], -1) * weighted)


def jacobian(outputs: Tensor, values: list[Tensor]) -> Tensor:
    """J ``[B, K, D]`` by one backward pass for each number."""
    rows = []
    for output in outputs.reshape(-1):
        found = torch.autograd.grad(
            output, values, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        rows.append(torch.cat([g.reshape(-1) for g in found]))
    return torch.stack(rows).reshape(*outputs.shape, -1)


@pytest.mark.parametrize("case", [c for c in CASES if not c.heavy], ids=lambda c: c.name)
def test_rows_squares_and_matrix_are_those_of_the_jacobian(case):
    examples = of_case(case)
    expected = jacobian(examples.outputs, examples.values)
    close = {"atol": 1e-9, "rtol": 1e-9}
    torch.testing.assert_close(examples.rows(slice(0, M)), expected, **close)
    torch.testing.assert_close(examples.rows(slice(1, 3)), expected[1:3], **close)
    expected = expected.flatten(0, 1)
    squares = examples.squares()
    torch.testing.assert_close(squares, expected.square().sum(0), **close)
    matrix = torch.zeros(examples.size, examples.size, dtype=torch.float64)
    add_gauss_newton_matrix(examples, matrix)
    torch.testing.assert_close(matrix, expected.T @ expected, **close)


@pytest.mark.parametrize("case", [c for c in CASES if not c.heavy][::4], ids=lambda c: c.name)
def test_squares_of_what_memory_does_not_hold(case, monkeypatch):
    """One output at a time, and gradients of single examples that fit no cache."""
    monkeypatch.setattr(example_gradients, "_KEPT", 1)
    monkeypatch.setattr(example_gradients, "_CACHE", 1)
    examples = of_case(case)
    expected = jacobian(examples.outputs, examples.values).flatten(0, 1).square().sum(0)
    squares = examples.squares()
    torch.testing.assert_close(squares, expected, atol=1e-9, rtol=1e-9)


def test_rows_that_are_no_examples_are_found_by_looking():
    """The first dimension counts positions, as many as there are examples."""
    x = torch.randn(3, 3, dtype=torch.float64)
    w = torch.randn(3, dtype=torch.float64, requires_grad=True)
    recorder = SquaredGradients([w])
    with recorder:
        outputs = F.softmax((x * w).T, 0).sum(1, keepdim=True).cumsum(0)
    with pytest.warns(DviWarning, match=r"latent site 'w': the per-example gradients .* disagree"):
        examples = ExampleGradients(recorder, outputs, names=["w"])
    torch.testing.assert_close(examples.rows(slice(0, 3)), jacobian(outputs, [w]))
