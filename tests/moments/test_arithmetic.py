# SPDX-License-Identifier: Apache-2.0
"""Sums, products, powers and conversions: exact rules against enumeration."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments import GaussianMoments

NODES, WEIGHTS = (torch.from_numpy(a) for a in np.polynomial.hermite_e.hermegauss(16))
PROBABILITIES = WEIGHTS / WEIGHTS.sum()


def gaussian(*shape: int, seed: int = 0, shift: float = 0.0) -> GaussianMoments:
    generator = torch.Generator().manual_seed(seed)
    loc, variance = (f(shape, generator=generator, dtype=torch.float64) for f in (torch.randn, torch.rand))
    return GaussianMoments(loc + shift, variance + 0.1)


X, Y, Z = (gaussian(3, 4, seed=k) for k in range(3))
ROW = gaussian(4, seed=3)
C = gaussian(3, 4, seed=4).loc
NUMBER = torch.tensor(1.7, dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """One call, whose arguments may be Gaussians; elements with elements of the same place only."""

    func: Callable
    args: tuple
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *args: Any) -> Any:
        """Call with these arguments in place of the case's; methods as methods, which is how users reach them."""
        name = self.func.__name__
        if getattr(torch.Tensor, name, None) is self.func:
            return getattr(args[0], name)(*args[1:], **self.kwargs)
        return self.func(*args, **self.kwargs)

    def __str__(self) -> str:
        kinds = ",".join("x" if isinstance(a, GaussianMoments) else type(a).__name__ for a in self.args)
        return f"{self.func.__name__}({kinds}{',' if self.kwargs else ''}{','.join(self.kwargs)})"


ELEMENTWISE = [
    Case(torch.add, (X, Y)),
    Case(torch.add, (X, X)),
    Case(torch.add, (X, X), {"alpha": 3}),
    Case(torch.add, (X, Y), {"alpha": -2.5}),
    Case(torch.add, (C, Y), {"alpha": -2.5}),
    Case(torch.add, (X, C), {"alpha": 2}),
    Case(torch.add, (X, ROW)),
    Case(torch.add, (ROW, C)),
    Case(torch.add, (X, 2)),
    Case(torch.add, (2, X)),
    Case(torch.sub, (X, Y)),
    Case(torch.sub, (X, X)),
    Case(torch.sub, (1.5, X)),
    Case(torch.subtract, (X, C), {"alpha": 2}),
    Case(torch.rsub, (X, C)),
    Case(torch.rsub, (X, Y), {"alpha": 2}),
    Case(torch.neg, (X,)),
    Case(torch.negative, (X,)),
    Case(torch.mul, (X, Y)),
    Case(torch.mul, (X, X)),
    Case(torch.mul, (C, X)),
    Case(torch.mul, (ROW, C)),
    Case(torch.mul, (X, ROW)),
    Case(torch.mul, (NUMBER, X)),
    Case(torch.mul, (X, C > 0)),
    Case(torch.multiply, (X, 3)),
    Case(torch.square, (X,)),
    Case(torch.div, (X, C)),
    Case(torch.div, (X, 3)),
    Case(torch.div, (X, X)),
    Case(torch.divide, (X, NUMBER)),
    Case(torch.true_divide, (X, 4)),
    Case(torch.pow, (X, 0)),
    Case(torch.pow, (X, 1)),
    Case(torch.pow, (X, 2)),
    Case(torch.pow, (X, 3)),
    Case(torch.pow, (X, 3.0)),
    Case(torch.where, (C > 0, X, Y)),
    Case(torch.where, (C > 0, X, 0.0)),
    Case(torch.where, (C > 0, NUMBER, X)),
    Case(torch.where, (C > 0, ROW, C)),
    Case(torch.Tensor.where, (X, C > 0, Y)),
    Case(torch.Tensor.where, (X, C > 0, C)),
    Case(torch.Tensor.where, (C, C > 0, X)),
    Case(torch.masked_fill, (X, C > 0, -1.5)),
]

# Sums of independent elements: mean and variance of each element add up.
REDUCTIONS = [
    Case(torch.sum, (X,)),
    Case(torch.sum, (X, 1)),
    Case(torch.sum, (X, (0, 1))),
    Case(torch.sum, (X,), {"dim": -1, "keepdim": True}),
    Case(torch.sum, (X,), {"axis": 0}),
    Case(torch.mean, (X,)),
    Case(torch.mean, (X, 0)),
    Case(torch.mean, (X, (0, 1), True)),
    Case(torch.mean, (X,), {"dim": -1}),
    Case(torch.cumsum, (X, 1)),
]

CONVERSIONS = [
    Case(torch.clone, (X,)),
    Case(torch.detach, (X,)),
    Case(torch.Tensor.to, (X, torch.float32)),
    Case(torch.Tensor.to, (X,), {"device": "cpu", "dtype": torch.float32}),
    Case(torch.Tensor.to, (X, C)),
    Case(torch.Tensor.to, (X, Y)),
    Case(torch.Tensor.type, (X, torch.float32)),
    Case(torch.Tensor.type_as, (X, C.float())),
    Case(torch.Tensor.type_as, (X, GaussianMoments(C.float(), C.float().square()))),
    Case(torch.Tensor.float, (X,)),
    Case(torch.Tensor.double, (X,)),
    Case(torch.Tensor.half, (X,)),
    Case(torch.Tensor.bfloat16, (X,)),
    Case(torch.Tensor.cpu, (X,)),
    Case(torch.Tensor.contiguous, (X,)),
]

CERTAIN = [
    Case(torch.zeros_like, (X,)),
    Case(torch.ones_like, (X,)),
    Case(torch.empty_like, (X,)),
    Case(torch.full_like, (X, 2.0)),
    Case(torch.rand_like, (X,)),
    Case(torch.randn_like, (X,)),
    Case(torch.Tensor.new_zeros, (X, (3, 4))),
    Case(torch.Tensor.new_ones, (X, (3, 4))),
    Case(torch.Tensor.new_empty, (X, (3, 4))),
    Case(torch.Tensor.new_full, (X, (3, 4), 2.0)),
    Case(torch.Tensor.new_tensor, (X, [[1.0] * 4] * 3)),
    Case(torch.isfinite, (X,)),
    Case(torch.isnan, (X,)),
    Case(torch.isinf, (X,)),
]

QUESTIONS = [Case(torch.is_floating_point, (X,)), Case(torch.is_complex, (X,)), Case(torch.numel, (X,))]

# Rules with tests of their own below.
OTHERS = [
    Case(torch.reciprocal, (X,)),
    Case(torch.Tensor.cuda, (X,)),
]

CASES = [*ELEMENTWISE, *REDUCTIONS, *CONVERSIONS, *CERTAIN, *QUESTIONS, *OTHERS]


def enumerated(case: Case) -> tuple[Tensor, Tensor]:
    """Mean and variance over all combinations of quadrature nodes, one axis for each Gaussian."""
    unique = list(dict.fromkeys(a for a in case.args if isinstance(a, GaussianMoments)))
    weight = torch.ones((), dtype=torch.float64)
    values = {}
    for k, x in enumerate(unique):
        nodes = NODES.reshape(-1, *[1] * (len(unique) - 1 - k), 1, 1)
        values[x] = x.loc + x.variance.sqrt() * nodes
        weight = weight * PROBABILITIES.reshape(-1, *[1] * (len(unique) - 1 - k), 1, 1)
    result = case(*(values[a] if isinstance(a, GaussianMoments) else a for a in case.args))
    axes = tuple(range(len(unique)))
    mean = (weight * result).sum(axes)
    return mean, (weight * (result - mean).square()).sum(axes)


def copied(case: Case) -> Case:
    """The same case with new objects, the same where they were the same."""
    copies = {a: a.snapshot() for a in case.args if isinstance(a, GaussianMoments)}
    return Case(
        case.func, tuple(copies[a] if isinstance(a, GaussianMoments) else a for a in case.args), case.kwargs
    )


@pytest.mark.parametrize("case", ELEMENTWISE, ids=str)
def test_elementwise_rules_are_exact(case: Case) -> None:
    result = case(*case.args)
    mean, variance = enumerated(case)
    torch.testing.assert_close(result.loc, mean, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(result.variance, variance, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", [c for c in ELEMENTWISE if isinstance(c.args[0], GaussianMoments)], ids=str)
def test_methods_and_forms_in_place_agree(case: Case) -> None:
    expected = case(*case.args)
    name = case.func.__name__
    for method in (name, f"{name}_"):
        fresh = copied(case)
        if not hasattr(torch.Tensor, method) or expected.shape != fresh.args[0].shape:
            continue
        x = fresh.args[0]
        result = getattr(x, method)(*fresh.args[1:], **fresh.kwargs)
        torch.testing.assert_close(result.loc, expected.loc)
        torch.testing.assert_close(result.variance, expected.variance)
        assert (result is x) == method.endswith("_")


@pytest.mark.parametrize("case", REDUCTIONS, ids=str)
def test_reductions_are_exact(case: Case) -> None:
    result = case(*case.args)
    x = case.args[0]
    # The dense map from elements to sums, one column for each element.
    units = torch.eye(x.numel(), dtype=torch.float64).reshape(-1, *x.shape)
    columns = torch.stack([case(u, *case.args[1:]) for u in units], -1)
    torch.testing.assert_close(result.loc, columns @ x.loc.reshape(-1), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        result.variance, columns.square() @ x.variance.reshape(-1), rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("case", CONVERSIONS, ids=str)
def test_conversions_apply_to_both(case: Case) -> None:
    result = case(*case.args)
    certain = tuple(a.loc if isinstance(a, GaussianMoments) else a for a in case.args[1:])
    for part, value in ((result.loc, X.loc), (result.variance, X.variance)):
        expected = case(value, *certain)
        assert part.dtype is expected.dtype
        torch.testing.assert_close(part, expected)


@pytest.mark.parametrize("case", CERTAIN, ids=str)
def test_what_asks_for_shape_and_dtype_is_certain(case: Case) -> None:
    result = case(*case.args)
    expected = case(X.loc, *case.args[1:])
    assert type(result) is Tensor
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)


@pytest.mark.parametrize("case", QUESTIONS, ids=str)
def test_questions_are_answered_by_the_mean(case: Case) -> None:
    assert case.func(X) == case.func(X.loc)
    assert getattr(X, case.func.__name__)() == case.func(X.loc)


def test_finite_looks_at_the_variance_too() -> None:
    x = GaussianMoments(torch.tensor([1.0, math.nan, 1.0]), torch.tensor([1.0, 1.0, math.inf]))
    assert torch.isfinite(x).tolist() == [True, False, False]
    assert x.isnan().tolist() == [False, True, False]
    assert torch.isinf(x).tolist() == [False, False, True]


def test_detached_moments_have_no_history() -> None:
    x = GaussianMoments(C.clone().requires_grad_(), C.square().requires_grad_())
    for y in (torch.detach(x), x.detach(), x.data):
        assert not y.loc.requires_grad and not y.variance.requires_grad
    assert x.clone().variance.requires_grad


def test_conversion_to_what_it_is_already_gives_the_same_object() -> None:
    x = gaussian(2)
    assert x.double() is x and x.contiguous() is x and x.to(torch.float64) is x


def test_a_move_moves_both(device) -> None:
    x = gaussian(2).to(device)
    assert x.loc.device == x.variance.device == device


def test_dtypes_are_promoted() -> None:
    x = GaussianMoments(torch.ones(2), torch.ones(2))
    for y in (x + C[0, :2], C[0, :2] * x, x / C[0, :2], x - X[0, :2], torch.where(C[0, :2] > 0, x, C[0, :2])):
        assert y.loc.dtype is y.variance.dtype is torch.float64
    for y in (x * 2.5, 2 - x, x + torch.tensor(1.0, dtype=torch.float64), x * torch.arange(2)):
        assert y.loc.dtype is y.variance.dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
@pytest.mark.parametrize("call", [torch.mul, torch.div], ids=lambda f: f.__name__)
def test_squares_of_small_integers_do_not_overflow(call: Callable, dtype: torch.dtype) -> None:
    x = GaussianMoments(torch.ones(2), torch.ones(2))
    factor = torch.tensor([100, 17], dtype=dtype)
    torch.testing.assert_close(call(x, factor).variance, call(x, factor.float()).variance)
    assert call(x, factor).dtype is torch.float32


def test_a_numpy_integer_does_not_overflow_either() -> None:
    assert (X * np.int8(100)).variance.equal((X * 100).variance)


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 0.0])
def test_an_exponent_may_be_a_tensor_without_dimensions(exponent: float) -> None:
    expected = X**exponent
    result = X ** torch.tensor(exponent)
    assert result.loc.equal(expected.loc) and result.variance.equal(expected.variance)


def test_numpy_numbers_multiply_from_both_sides() -> None:
    for y in (np.float64(2) * X, X * np.float64(2)):
        torch.testing.assert_close(y.variance, 4 * X.variance)


# --- the same object twice -----------------------------------------------------------------------------------


def test_an_object_with_itself_is_not_independent_of_itself() -> None:
    x = gaussian(4)
    torch.testing.assert_close((x + x).variance, 4 * x.variance)
    assert (x - x).variance.eq(0).all() and (x / x).variance.eq(0).all()
    torch.testing.assert_close((x * x).variance, torch.square(x).variance)
    other = x.clone()
    torch.testing.assert_close((x + other).variance, 2 * x.variance)


def test_in_place_an_object_with_itself_is_not_independent_either() -> None:
    x = gaussian(4)
    expected = 4 * x.variance
    x += x
    torch.testing.assert_close(x.variance, expected)


def test_operators_on_the_right_of_tensors() -> None:
    x, c = gaussian(4), C[0]
    for result, expected in (
        (c + x, torch.add(c, x)),
        (c - x, torch.sub(c, x)),
        (c * x, torch.mul(c, x)),
        (2 - x, torch.sub(2, x)),
        (3 * x, torch.mul(x, 3)),
        (x**2, torch.square(x)),
    ):
        torch.testing.assert_close(result.loc, expected.loc)
        torch.testing.assert_close(result.variance, expected.variance)
    total = c.clone()
    total += x  # a name bound to a tensor is bound to moments from here on
    assert isinstance(total, GaussianMoments)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: 1 / x, "deviation of at most 0.2"),
        (lambda x: x**-1, "x.loc"),
        (lambda x: (x - 10) ** 0.5, "positive mean"),
        (lambda x: x**x, "exponent"),
        (lambda x: x ** torch.ones(2), "exponent"),
        (lambda x: torch.div(x, 2, rounding_mode="floor"), "rounding"),
        (lambda x: torch.where(x, x, x), "condition"),
        (lambda x: x.long(), "no rule"),
        (lambda x: x.to(torch.int64), "integers"),
    ],
)
def test_refusals_name_the_way_out(call: Callable, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        call(GaussianMoments(torch.ones(2), torch.ones(2)))
