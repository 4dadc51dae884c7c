# SPDX-License-Identifier: Apache-2.0
"""What ``torch.where`` makes of a comparison of moments: quadrature with a break at the cut, and what it refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.expectations.points import at_points
from pyro_dvi.moments import GaussianMoments
from tests.moments.battery import CHECKS, Case, check_spellings, name_of_check


def chosen_by(compare: Callable) -> Case:
    """A leaky rectifier with its corner at 0.25 and a jump there, by one way to compare."""
    swapped = compare.__name__.startswith("__")  # methods of a tensor

    def func(x: Any) -> Any:
        bound = torch.full((), 0.25, dtype=x.dtype)
        return torch.where(compare(bound, x) if swapped else compare(x, bound), x, 0.1 * x)

    func.__name__ = compare.__name__
    return Case(func, kinks=(0.25,), jumps=(0.25,))


COMPARISONS = [
    getattr(torch, name) for name in "gt ge lt le greater greater_equal less less_equal".split()
] + [getattr(torch.Tensor, f"__{name}__") for name in "gt ge lt le".split()]
SLOPES = torch.tensor(0.3, dtype=torch.float64)
STRAIGHT = {
    "leaky": (lambda x: torch.where(x > 0, x, 0.2 * x), False),
    "jump": (lambda x: torch.where(x > 0, 2 * x + 1, -x), True),
    "step": (lambda x: torch.where(x <= 0, torch.zeros_like(x), 1.0), True),
    "learned slope": (lambda x: torch.where(x > 0, x, SLOPES.to(x.dtype) * x), False),
    "not": (lambda x: torch.where(~(x > 0), 0.0, x), False),
    "masked_fill": (lambda x: x.masked_fill(x < 0, 0.5), True),
    "of a multiple": (lambda x: (lambda y: torch.where(y > 0, 3 * y - 1, 0.0))(2 * x), True),
}
CURVED = {
    "elu": (lambda x: torch.where(x > 0, x, torch.expm1(0.5 * x.clamp_max(0))), False),
    "linear beyond a parabola": (lambda x: torch.where(x < 0, x.square(), 0.5 * x), False),
    "of a function of a multiple": (lambda x: torch.where(x > 0, torch.sigmoid(2 * x), 0.5), False),
}


def cases(table: dict[str, Any], **options: Any) -> list[Case]:
    return [
        Case(func, kinks=(0.0,), jumps=(0.0,) if jumps else (), note=name, **options)
        for name, (func, jumps) in table.items()
    ]


RULES = [*map(chosen_by, COMPARISONS), *cases(STRAIGHT)]
NARROW = (1e-3, 1e-2, 0.1, 0.5, 1.0)
SMOOTH = cases(CURVED, scales=NARROW, reach=10.0, tolerance=(1e-8, 3e-4))
CASES = [Case(compare) for compare in COMPARISONS]


@pytest.mark.parametrize("check", [c for c in CHECKS if c is not check_spellings], ids=name_of_check)
@pytest.mark.parametrize("case", [*RULES, *SMOOTH], ids=str)
def test_rule(case: Case, check: Callable[[Case], None]) -> None:
    check(case)


X = GaussianMoments(torch.linspace(-3, 3, 7), torch.full((7,), 0.7))


def test_a_comparison_may_have_the_tensor_on_the_left() -> None:
    for function in (
        lambda x: torch.where(torch.zeros(7) < x, x, 0.0),
        lambda x: torch.where(0 < x, x, 0.0),  # noqa: SIM300
    ):
        torch.testing.assert_close(function(X).variance, F.relu(X).variance)


def test_elements_below_a_bound_are_overwritten() -> None:
    y = X.clone()
    y[y < 0] = 0.0
    assert y.loc.equal(F.relu(X).loc)
    z = X.clone()
    assert z.masked_fill_(z < 0, 0.0) is z
    assert z.variance.equal(F.relu(X).variance)


def test_a_bound_and_a_slope_for_each_element_get_gradients() -> None:
    bound, slope = torch.zeros(7, dtype=torch.float64), torch.linspace(0.1, 0.7, 7, dtype=torch.float64)
    loc, variance = X.loc.double(), X.variance.double()

    def moments(bound, slope):
        x = GaussianMoments(loc, variance)
        y = torch.where(x > bound, x, slope * x)
        return y.loc, y.variance

    assert torch.autograd.gradcheck(moments, (bound.requires_grad_(), slope.requires_grad_()))


def test_a_likelihood_sees_through_the_choice() -> None:
    scale = torch.where(X > 0, X + 1, torch.exp(X))
    values = X.loc + X.variance.sqrt()
    torch.testing.assert_close(
        at_points(scale, torch.ones(1, 7))[0], torch.where(values > 0, values + 1, values.exp())
    )


def test_the_condition_asks_for_what_x_was() -> None:
    x = X.clone()
    condition, branch = x > 0, 0.1 * x
    x += 1
    torch.testing.assert_close(torch.where(condition, x - 1, branch).variance, F.leaky_relu(X, 0.1).variance)


REFUSALS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "another Gaussian": (lambda x: torch.where(x > 0, x.flip(0), 0.0), r"Compare x\.loc"),
    "a copy": (lambda x: torch.where(x > 0, x.clone(), 0.0), "how this one depends"),
    "a function of all elements": (lambda x: torch.where(x > 0, torch.softmax(x, 0), 0.0), "each element"),
    "a nonlinear function": (lambda x: torch.where(F.relu(x) > 1, x, 0.0), "what went into"),
    "two uncertain things": (lambda x: x > x.flip(0), r"torch\.maximum"),
    "a product": (lambda x: x * (x > 0), r"torch\.where\(x > c, a, b\)"),
    "a conversion": (lambda x: (x > 0).float(), r"torch\.where\(x > c, a, b\)"),
    "two conditions": (lambda x: (x > 0) & (x < 1), "only a probability"),
    "any": (lambda x: (x > 0).any(), r"x\.loc"),
    "torch.sum": (lambda x: torch.sum(x > 0), r"x\.loc"),
    "if": (lambda x: 1 if x[0] > 0 else 0, r"x\.loc"),
    "an index": (lambda x: x[x > 0], "certain"),
}


@pytest.mark.parametrize(("call", "words"), REFUSALS.values(), ids=REFUSALS)
def test_a_refusal_says_what_to_do(call: Callable, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        call(GaussianMoments(torch.linspace(-1, 1, 4), torch.ones(4)))


def test_an_unknown_attribute_is_an_attribute_error() -> None:
    assert not hasattr(X > 0, "spam")
