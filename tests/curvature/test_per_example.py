# SPDX-License-Identifier: Apache-2.0
"""Sums of squared per-example gradients against a plain loop over examples."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_dvi.curvature import EmpiricalFisher, Linearisation, per_example
from pyro_dvi.curvature.per_example import PerExampleRecorder, per_example_rule, summed_squared_gradients

M = 5


@dataclass(frozen=True)
class Case:
    """A model ``call(x, *weights) -> one number per example``, and whether the layer-wise rules cover it."""

    name: str
    call: Callable[..., Tensor]
    x: tuple[int, ...]
    weights: tuple[tuple[int, ...], ...]
    functions: tuple[Callable, ...] = ()
    covered: tuple[bool, ...] | None = None  # by weight; all by default

    def inputs(self) -> tuple[Tensor, list[Tensor]]:
        generator = torch.Generator().manual_seed(2)
        x, *weights = (
            torch.randn(s, dtype=torch.float64, generator=generator) for s in (self.x, *self.weights)
        )
        return x, [w.requires_grad_() for w in weights]


def head(h: Tensor) -> Tensor:
    """A non-linear number per example."""
    return torch.tanh(h.flatten(1)).square().sum(1) if h.dim() > 1 else torch.tanh(h)


def conv(dims: int, x: tuple, w: tuple, bias: bool = True, covered: bool = True, **options: Any) -> Case:
    function = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
    ordered = [options.get(k, d) for k, d in (("stride", 1), ("padding", 0), ("dilation", 1), ("groups", 1))]

    def call(x: Tensor, weight: Tensor, b: Tensor | None = None) -> Tensor:
        return head(function(x, weight, b, *ordered))

    name = ", ".join([f"conv{dims}d", *(f"{k}={v}" for k, v in options.items())])
    weights = (w, (w[0],)) if bias else (w,)
    return Case(name, call, (M, *x), weights, (function,), (covered,) * len(weights))


def keyword_linear(x: Tensor, w: Tensor) -> Tensor:
    return head(F.linear(input=x, weight=w))


def twice(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return head(F.linear(F.softplus(F.linear(x, w, b)), w, b))


def in_place(x: Tensor, w: Tensor) -> Tensor:
    h = F.linear(x, w)
    h.mul_(h.detach() * 0 + 3.0)
    return head(h)


def in_place_activation(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return head(F.silu(F.linear(x, w, b), inplace=True))


def frozen_part(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        constant = F.linear(x, w)
    return head(F.linear(x, w) + constant)


def written_into(x: Tensor, w: Tensor) -> Tensor:
    buffer = torch.zeros(3, 4, dtype=x.dtype)
    buffer[0] = w[0]
    buffer = torch.cat([buffer, w[1:]])
    return head(F.linear(F.linear(x, w), buffer.T[:, :3].T))


CASES = [
    Case("linear", lambda x, w, b: head(F.linear(x, w, b)), (M, 3), ((4, 3), (4,)), (F.linear,)),
    Case("linear without bias", lambda x, w: head(F.linear(x, w)), (M, 3), ((4, 3),)),
    Case("linear over positions", lambda x, w, b: head(F.linear(x, w, b)), (M, 2, 6, 3), ((4, 3), (4,))),
    Case(
        "deep",
        lambda x, v, w, b: head(F.linear(F.silu(F.linear(x, v)), w, b)),
        (M, 3),
        ((6, 3), (2, 6), (2,)),
    ),
    Case("used twice", twice, (M, 3), ((3, 3), (3,))),
    Case("tied", lambda x, w: head(F.linear(F.silu(F.linear(x, w)), w.T)), (M, 3), ((4, 3),), (), (False,)),
    Case("matmul", lambda x, w: head(torch.matmul(x, w)), (M, 3), ((3, 4),), (torch.matmul,)),
    Case("method", lambda x, w: head(x.matmul(w)), (M, 3), ((3, 4),), (torch.Tensor.matmul,)),
    Case("x @ w", lambda x, w: head(x @ w), (M, 3), ((3, 4),), (torch.Tensor.__matmul__,)),
    Case("x @ vector", lambda x, w: head(x @ w), (M, 3), ((3,),)),
    Case("positions @ vector", lambda x, w: head(x @ w), (M, 2, 3), ((3,),)),
    Case("mm", lambda x, w: head(torch.mm(x, w)), (M, 3), ((3, 4),), (torch.mm,)),
    Case("mm method", lambda x, w: head(x.mm(w)), (M, 3), ((3, 4),), (torch.Tensor.mm,)),
    Case("add", lambda x, b: head(torch.add(x, b)), (M, 3), ((3,),), (torch.add,)),
    Case("add method", lambda x, b: head(x.add(b)), (M, 3), ((3,),), (torch.Tensor.add,)),
    Case("x + b", lambda x, b: head(x + b), (M, 2, 3), ((2, 3),), (torch.Tensor.__add__,)),
    Case("b + x", lambda x, b: head(b + x), (M, 3), ((3,),)),
    Case("1 + b", lambda x, b: head(x * (1 + b)), (M, 3), ((3,),), (torch.Tensor.__radd__,), (False,)),
    Case("scalar", lambda x, b: head(x + b), (M, 3), ((),)),
    Case(
        "functional",
        lambda x, v, c, w, b: head(torch.tanh(x @ v + c) @ w + b),
        (M, 3),
        ((3, 4), (4,), (4,), ()),
    ),
    conv(1, (2, 7), (4, 2, 3)),
    conv(1, (4, 8), (6, 2, 3), stride=2, padding=1, dilation=2, groups=2),
    conv(2, (2, 5, 4), (4, 2, 3, 2)),
    conv(2, (4, 6, 5), (6, 2, 3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2),
    conv(2, (3, 4, 4), (3, 1, 3, 3), bias=False, padding=1, groups=3),
    conv(2, (2, 4, 4), (3, 2, 2, 2), stride=(2,), padding=(1,)),
    conv(2, (2, 4, 4), (3, 2, 3, 3), bias=False, padding="same", covered=False),
    conv(3, (2, 3, 3, 3), (2, 2, 2, 2, 2), covered=False),
    Case("embedding", lambda x, e: head(F.embedding(_tokens(x), e)), (M, 3), ((7, 4),), (), (False,)),
    Case("keywords", keyword_linear, (M, 3), ((4, 3),), (), (False,)),
    Case("einsum", lambda x, w: head(torch.einsum("bi,oi->bo", x, w)), (M, 3), ((4, 3),), (), (False,)),
    Case("w @ features", lambda x, w: head((w @ x.T).T), (M, 3), ((4, 3),), (), (False,)),
    Case("square w @ features", lambda x, w: head((w @ x.T).T), (M, 3), ((M, 3),), (), (False,)),
    Case("scaled weight", lambda x, w: head(F.linear(x, 2 * w)), (M, 3), ((4, 3),), (), (False,)),
    Case(
        "transposed elsewhere", lambda x, w: head(F.linear(x, w) + x @ w.T), (M, 3), ((4, 3),), (), (False,)
    ),
    Case(
        "stacked",
        lambda x, v, w: head(x @ torch.stack([v, w]).sum(0) + x @ v),
        (M, 3),
        ((3, 2), (3, 2)),
        (),
        (False, False),
    ),
    Case("written into a buffer", written_into, (M, 4), ((4, 4),), (), (False,)),
    Case(
        "one row times M rows",
        lambda x, w: head(F.linear(x[0], w) * x.sum(1)),
        (M, 3),
        ((M, 3),),
        (),
        (False,),
    ),
    Case(
        "one picture",
        lambda x, w, b: head(F.conv2d(x[0], w, b).sum((1, 2)) * x.sum((1, 2, 3))),
        (M, 1, 3, 3),
        ((M, 1, 2, 2), (M,)),
        (),
        (False, False),
    ),
    Case("changed in place", in_place, (M, 3), ((4, 3),)),
    Case("activated in place", in_place_activation, (M, 3), ((4, 3), (4,))),
    Case("no_grad", frozen_part, (M, 3), ((4, 3),)),
    Case("unused", lambda x, w, v: head(F.linear(x, w)), (M, 3), ((4, 3), (2,)), (), (True, False)),
    Case("outer", lambda x, w: head(x[:, None, :] * w), (M, 3), ((1, 3),), (), (False,)),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


def _tokens(x: Tensor) -> Tensor:
    return (x.abs() * 10).long() % 7  # some tokens repeat


def loop(call: Callable[..., Tensor], x: Tensor, weights: list[Tensor], cotangent: Tensor) -> list[Tensor]:
    totals = [torch.zeros_like(w) for w in weights]
    for f, c in zip(call(x, *weights).reshape(-1), cotangent.reshape(-1), strict=True):
        grads = torch.autograd.grad(f, weights, create_graph=True, allow_unused=True)
        totals = [t if g is None else t + (c * g).square() for t, g in zip(totals, grads, strict=True)]
    return totals


def fast(call: Callable[..., Tensor], x: Tensor, weights: list[Tensor], cotangent: Tensor) -> list[Tensor]:
    recorder = PerExampleRecorder(weights)
    with recorder:
        outputs = call(x, *weights)
    likelihood = Linearisation([str(k) for k in range(len(weights))], weights, [], [], recorder=recorder)
    return summed_squared_gradients(likelihood, outputs, cotangent)


def test_every_rule_has_a_case():
    assert {f for case in CASES for f in case.functions} - {F.conv3d} == set(per_example._RULES)


@every_case
def test_squares_and_their_gradient_are_those_of_a_loop(case):
    x, weights = case.inputs()
    cotangent = torch.linspace(0.5, 1.5, M, dtype=torch.float64)
    ours, exact = fast(case.call, x, weights, cotangent), loop(case.call, x, weights, cotangent)
    torch.testing.assert_close(ours, exact, atol=1e-10, rtol=1e-10)

    def penalty_gradient(squares: list[Tensor]) -> tuple:
        scales = [torch.linspace(1, 2, s.numel(), dtype=s.dtype).view_as(s) for s in squares]
        penalty = torch.stack([(a * s).sum() for a, s in zip(scales, squares, strict=True)]).sum()
        return torch.autograd.grad(penalty, weights, allow_unused=True, materialize_grads=True)

    torch.testing.assert_close(penalty_gradient(ours), penalty_gradient(exact), atol=1e-9, rtol=1e-9)


@every_case
def test_coverage_of_the_fast_rules(case, monkeypatch):
    """Counts the weights that fall back on one backward pass per example."""
    slow: list[int] = []
    original = per_example._one_pass_per_example

    def counting(outputs: Tensor, cotangent: Tensor, values: list[Tensor]) -> list[Tensor]:
        slow.extend(id(v) for v in values)
        return original(outputs, cotangent, values)

    monkeypatch.setattr(per_example, "_one_pass_per_example", counting)
    x, weights = case.inputs()
    fast(case.call, x, weights, torch.ones(M, dtype=torch.float64))
    covered = case.covered or (True,) * len(weights)
    assert [id(w) not in slow for w in weights] == list(covered)


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
        return torch.tanh(x * w).sum(1)

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


def test_curvature_without_a_recorder_is_exact_as_well():
    x, w = torch.randn(M, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64, requires_grad=True)
    likelihood = Linearisation(["w"], [w], [torch.ones(3, dtype=torch.float64)], [])
    squares = summed_squared_gradients(likelihood, torch.tanh(x @ w), torch.ones(M, dtype=torch.float64))
    torch.testing.assert_close(squares, loop(lambda x, w: torch.tanh(x @ w), x, [w], torch.ones(M)))
    assert isinstance(EmpiricalFisher().recorder([w]), PerExampleRecorder)
