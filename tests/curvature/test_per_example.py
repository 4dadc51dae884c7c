# SPDX-License-Identifier: Apache-2.0
"""Sums of squared per-example gradients against a plain loop over examples."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_dvi.curvature import EmpiricalFisher, diagonals
from pyro_dvi.curvature.diagonals import summed_squared_gradients
from pyro_dvi.curvature.per_example import per_example_rule
from pyro_dvi.curvature.per_example.example_rules import _RULES
from pyro_dvi.curvature.squared_gradients import SquaredGradients
from tests.curvature.per_example_cases import CASES, M, head, loop

# An even kernel pads one side more than the other.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding=.same.:UserWarning")
every_case = pytest.mark.parametrize(
    "case", [c for c in CASES if c.twice and not c.heavy], ids=lambda c: c.name
)


def fast(call: Callable[..., Tensor], x: Tensor, weights: list[Tensor], cotangent: Tensor) -> list[Tensor]:
    noted = SquaredGradients(weights, differentiable=True)
    with noted:
        outputs = call(x, *weights)
    served = noted.served(len(outputs)) if outputs.dim() == 1 else {}
    served = noted.examined(served, outputs).kept(served)
    return summed_squared_gradients(weights, outputs, cotangent, noted, served)


def test_every_rule_has_a_case():
    used = set()
    for case in CASES:
        x, weights = case.inputs()
        noted = SquaredGradients(weights)
        with noted:
            outputs = case.call(x, *weights)
        used |= {use.function for uses in noted.served(len(outputs)).values() for use in uses}
    operators = {f for f in _RULES if f.__name__.startswith("__")}  # torch may report x + b as Tensor.add
    assert used | operators == set(_RULES)


@every_case
def test_squares_and_their_gradient_are_those_of_a_loop(case, monkeypatch):
    """No covered weight falls back on one backward pass per example."""
    slow: list[int] = []
    original = diagonals.pass_per_example

    def counting(outputs: Tensor, cotangent: Tensor, values: list[Tensor], **options) -> list[Tensor]:
        slow.extend(id(v) for v in values)
        return original(outputs, cotangent, values, **options)

    monkeypatch.setattr(diagonals, "pass_per_example", counting)
    x, weights = case.inputs()
    cotangent = torch.linspace(0.5, 1.5, M, dtype=torch.float64)
    ours, exact = fast(case.call, x, weights, cotangent), loop(case.call, x, weights, cotangent)
    assert [id(w) not in slow for w in weights] == list(case.covered or (True,) * len(weights))
    torch.testing.assert_close(ours, exact, atol=1e-10, rtol=1e-10)

    def penalty_gradient(squares: list[Tensor]) -> tuple:
        scales = [torch.linspace(1, 2, s.numel(), dtype=s.dtype).view_as(s) for s in squares]
        penalty = torch.stack([(a * s).sum() for a, s in zip(scales, squares, strict=True)]).sum()
        return torch.autograd.grad(penalty, weights, allow_unused=True, materialize_grads=True)

    torch.testing.assert_close(penalty_gradient(ours), penalty_gradient(exact), atol=1e-9, rtol=1e-9)


def test_penalty_gradient_against_finite_differences():
    case = CASES[3]
    x, weights = case.inputs()

    def penalty(*values: Tensor) -> Tensor:
        squares = fast(case.call, x, [v.view_as(v) for v in values], torch.ones(M, dtype=torch.float64))
        return torch.stack([s.sum() for s in squares]).sum()

    assert torch.autograd.gradcheck(penalty, weights)


def test_several_batch_dimensions_count_every_element_as_an_example():
    x, w = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64, requires_grad=True)
    cotangent = torch.rand(2, 3, dtype=torch.float64)

    def call(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x @ w)

    torch.testing.assert_close(
        fast(call, x, [w], cotangent), loop(call, x, [w], cotangent), atol=1e-10, rtol=1e-10
    )


def test_more_examples_than_a_chunk_of_the_fallback():
    x = torch.randn(150, 2, dtype=torch.float64)
    w = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def call(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x * w.clone()).sum(1)

    cotangent = torch.ones(150, dtype=torch.float64)
    torch.testing.assert_close(
        fast(call, x, [w], cotangent), loop(call, x, [w], cotangent), atol=1e-10, rtol=1e-10
    )


def test_layers_of_torch_modules_are_covered():
    net = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), nn.Softplus(), nn.Flatten(), nn.Linear(32, 2)
    )
    net.double()
    x, weights = torch.randn(M, 1, 4, 4, dtype=torch.float64), list(net.parameters())

    def call(x: Tensor, *_: Tensor) -> Tensor:
        return head(net(x))

    cotangent = torch.ones(M, dtype=torch.float64)
    torch.testing.assert_close(
        fast(call, x, weights, cotangent), loop(call, x, weights, cotangent), atol=1e-10, rtol=1e-10
    )


def test_under_batch_norm_each_example_counts_through_its_own_rows():
    """The stated meaning: the gradient through other rows' statistics is attributed to those rows."""
    x = torch.randn(M, 3, dtype=torch.float64)
    w = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    h = F.linear(x, w)
    outputs = F.batch_norm(h, None, None, training=True).tanh().sum(1)
    (delta,) = torch.autograd.grad(outputs.sum(), h)
    expected = torch.einsum("bo,bi->boi", delta, x).square().sum(0)

    def call(x: Tensor, w: Tensor) -> Tensor:
        return F.batch_norm(F.linear(x, w), None, None, training=True).tanh().sum(1)

    (squares,) = fast(call, x, [w], torch.ones(M, dtype=torch.float64))
    torch.testing.assert_close(squares, expected)


def test_a_second_rule_for_a_function_is_refused():
    with pytest.raises(ValueError, match="already has the rule _linear"):
        per_example_rule(F.linear)(lambda *a: None)


def test_without_rules_squares_are_exact_as_well():
    x, w = torch.randn(M, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64, requires_grad=True)
    squares = summed_squared_gradients(
        [w], torch.tanh(x @ w), torch.ones(M, dtype=torch.float64), SquaredGradients([]), {}
    )
    torch.testing.assert_close(squares, loop(lambda x, w: torch.tanh(x @ w), x, [w], torch.ones(M)))
    assert isinstance(EmpiricalFisher().recorder([w]), SquaredGradients)
