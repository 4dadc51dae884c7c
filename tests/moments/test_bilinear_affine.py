# SPDX-License-Identifier: Apache-2.0
"""Linear layers, matrix products and embeddings against dense derivatives in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.bilinear import MultiplicativeMoments
from tests.moments.multilinear import CHECKS, FLOAT64, Case, exact


def rows(func: Callable, index: list, noise: tuple[int, ...] | None = None, **options: Any) -> Case:
    """A table of 5 rows: what it becomes is a dense matrix times it."""
    where = torch.tensor(index)
    matrix = func(where, torch.eye(5, dtype=FLOAT64), **options)
    return Case(
        func, ((5, 3),), options, (where,), 0, noise, plain=lambda table: matrix @ table, note=f"{index} "
    )


LINEAR = [
    Case(F.linear, ((4, 3), (2, 3))),
    Case(F.linear, ((4, 3), (2, 3), (2,))),
    Case(F.linear, ((3,), (2, 3), (2,))),
    Case(F.linear, ((2, 2, 3), (2, 3), (2,))),
    Case(F.linear, ((4, 3), (2, 3)), noise=(1, 3), cheap=True),
    Case(F.linear, ((4, 3), (2, 3), (2,)), noise=(3,), cheap=True),
    Case(F.linear, ((4, 3), (2, 3)), noise=(), cheap=True),
    Case(F.linear, ((4, 3), (2, 3)), noise=(2, 1)),
    Case(F.linear, ((4, 3), (2, 3)), noise=(2, 3)),
]
PRODUCTS = [
    Case(torch.matmul, ((4, 3), (3, 2))),
    Case(torch.matmul, ((3,), (3, 2))),
    Case(torch.matmul, ((4, 3), (3,))),
    Case(torch.matmul, ((3,), (3,))),
    Case(torch.matmul, ((2, 4, 3), (2, 3, 2))),
    Case(torch.matmul, ((4, 3), (2, 3, 2))),
    Case(torch.matmul, ((4, 3), (3, 2)), noise=(3, 1)),
    Case(torch.mm, ((4, 3), (3, 2))),
    Case(torch.matmul, ((2, 1, 2, 3), (3, 3, 2))),
    Case(torch.bmm, ((2, 4, 3), (2, 3, 2))),
    Case(torch.mv, ((4, 3), (3,))),
    Case(torch.dot, ((3,), (3,))),
    Case(torch.addmm, ((2,), (4, 3), (3, 2)), {"beta": 0.5, "alpha": 3.0}),
    Case(torch.addmm, ((4, 2), (4, 3), (3, 2)), weight=2, noise=(3, 1)),
    Case(torch.baddbmm, ((2, 4, 2), (2, 4, 3), (2, 3, 2)), {"alpha": -2}),
    Case(torch.addmv, ((4,), (4, 3), (3,)), {"beta": 2}),
]
EINSUMS = [
    Case(torch.einsum, ((2, 3), (3, 2)), first=("ij,jk->ik",)),
    Case(torch.einsum, ((2, 3), (3, 2)), first=("ij,jk",)),
    Case(torch.einsum, ((2, 3), (2, 3)), first=("ij,ij->",)),
    Case(torch.einsum, ((2, 3), (4,)), first=("ij,k->i",)),
    Case(torch.einsum, ((2, 3), (3, 2, 2)), first=("ij,jkl->il",)),
    Case(torch.einsum, ((2, 2, 3), (3, 2)), first=("...ij,jk->...ki",)),
    Case(torch.einsum, ((2, 2, 3), (3, 2)), first=("...j, jk",)),
    Case(torch.einsum, ((3, 3), (3,)), first=("ii,i->i",)),
    Case(torch.einsum, ((3, 3), (2,)), first=("ii,j->j",)),
    Case(torch.einsum, ((3, 3),), first=("ii->",)),
    Case(torch.einsum, ((2, 3),), first=("ij->j",)),
    Case(torch.einsum, ((2, 3, 2), (2, 2, 3)), first=("bid,bdj->bij",)),
]
TABLES = [
    rows(F.embedding, [[0, 3], [1, 4]]),
    rows(F.embedding, [0, 3, 3], noise=(5, 1)),
]
CASES = LINEAR + PRODUCTS + EINSUMS + TABLES


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule(case: Case, check: Callable) -> None:
    check(case)


@pytest.mark.parametrize("case", [c for c in CASES if c.cheap], ids=str)
def test_noise_of_inputs_takes_one_product(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: MultiplicativeMoments) -> None:
        raise AssertionError("the variance of every weight was computed")

    arguments = case.arguments()
    monkeypatch.setattr(MultiplicativeMoments, "variance", property(refuse))
    case(*arguments)


def test_operators_and_methods() -> None:
    case = Case(torch.matmul, ((2, 3), (3, 4)))
    x, w = case.arguments()
    expected = torch.matmul(x, w)
    for y in (x @ w, x.matmul(w), x.mm(w)):
        torch.testing.assert_close(y.variance, expected.variance)
    torch.testing.assert_close((x.loc @ w).variance, exact(torch.matmul, [x, w], (1,))[1])
    torch.testing.assert_close((x @ w.loc).variance, exact(torch.matmul, [x, w], (0,))[1])


def test_vector_with_itself() -> None:
    x = GaussianMoments(torch.tensor([1.0, -2.0], dtype=FLOAT64), torch.tensor([0.5, 0.3], dtype=FLOAT64))
    for y in (torch.dot(x, x), x @ x):
        # E[x²] = m² + v, Var[x²] = 2v² + 4m²v
        torch.testing.assert_close(y.loc, torch.tensor(1.5 + 4.3, dtype=FLOAT64))
        torch.testing.assert_close(y.variance, torch.tensor(0.5 + 2.0 + 0.18 + 4.8, dtype=FLOAT64))


SQUARE = GaussianMoments(torch.randn(3, 3), torch.ones(3, 3))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: SQUARE @ SQUARE, "with itself"),
        (lambda: torch.einsum("ij,ij->i", SQUARE, SQUARE), "same uncertain operand"),
        (lambda: torch.einsum("ij,jk,kl->il", SQUARE, torch.ones(3, 3), torch.ones(3, 3)), "two at a time"),
        (lambda: torch.einsum("...j->j", SQUARE), "ellipsis"),
        (lambda: torch.einsum("ij,jk->ik", SQUARE[:, :1], torch.ones(3, 3)), "size 1"),
        (lambda: F.embedding(torch.tensor([0]), SQUARE, max_norm=1.0), "max_norm"),
        (lambda: F.embedding_bag(torch.tensor([[0]]), SQUARE), "embedding_bag has no rule"),
    ],
)
def test_refusals(call: Callable, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        call()


@pytest.mark.parametrize("padding", [1, -4])
def test_padding_has_no_gradient_but_keeps_its_variance(padding: int) -> None:
    variance = torch.rand(5, 3).requires_grad_()
    y = F.embedding(
        torch.tensor([0, 1, 3]), GaussianMoments(torch.randn(5, 3), variance), padding_idx=padding
    )
    torch.testing.assert_close(y.variance, variance[[0, 1, 3]])
    y.variance.sum().backward()
    assert variance.grad[1].abs().max() == 0
    assert variance.grad[0].min() == 1


def test_transforms_of_torch_func() -> None:
    x, v, w = torch.randn(4, 3), torch.rand(4, 3), torch.randn(2, 3, requires_grad=True)

    def total(w: Tensor) -> Tensor:
        y = F.linear(GaussianMoments(x, v), GaussianMoments(w, v[:2])) @ torch.ones(2, 1)
        return y.loc.sum() + y.variance.square().sum()

    (expected,) = torch.autograd.grad(total(w), w)
    found = torch.func.vmap(torch.func.grad(total))(torch.stack([w.detach(), 2 * w.detach()]))
    torch.testing.assert_close(found[0], expected)


def test_batch_of_nets_with_noise_of_their_own() -> None:
    x, v, w, a = torch.randn(2, 1, 3, 2), torch.rand(2, 1, 3, 2), torch.randn(2, 2, 3), torch.rand(2, 2, 1)
    found = GaussianMoments(x, v) @ MultiplicativeMoments(w, a)
    expected = (v + (v + x.square()) * a.mT) @ w.square()
    torch.testing.assert_close(found.variance, expected)
