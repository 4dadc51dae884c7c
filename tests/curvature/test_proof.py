# SPDX-License-Identifier: Apache-2.0
"""Rules that do not give the gradients of single examples are found out; rounding and zero gradients prove nothing."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_dvi.curvature.per_example.proof import Finding, Proofs
from pyro_dvi.curvature.squared_gradients import SquaredGradients
from pyro_dvi.errors import ModelError

M = 5
both_types = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def recorded(call: Callable[..., Tensor], *weights: Tensor) -> tuple[SquaredGradients, Tensor]:
    torch.manual_seed(1)
    recorder = SquaredGradients(weights)
    with recorder:
        outputs = call(torch.randn(M, 3, dtype=weights[0].dtype), *weights)
    return recorder, outputs


def found(call: Callable[..., Tensor], *shapes: tuple[int, ...], dtype: torch.dtype) -> Finding:
    torch.manual_seed(0)
    weights = [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]
    recorder, outputs = recorded(call, *weights)
    served = recorder.served(M)
    assert served.keys() == set(range(len(shapes)))
    return recorder.examined(served, outputs)


def gradient_inside(x: Tensor, w: Tensor) -> Tensor:
    z = x.requires_grad_()
    (force,) = torch.autograd.grad(F.linear(z, w).tanh().sum(), z, create_graph=True)
    return (F.linear(z, w) + force).sum(1)


def table_as_long_as_the_batch(x: Tensor, w: Tensor) -> Tensor:
    return (x[:, None] + F.embedding(torch.arange(M), w)).tanh().mean(1).sum(1)


def examples_that_see_others(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w).tanh().cumsum(0).sum(1)


@both_types
@pytest.mark.parametrize(
    ("call", "rows"),
    [(gradient_inside, 3), (table_as_long_as_the_batch, M), (examples_that_see_others, 2)],
)
def test_what_rules_do_not_see_is_found_out(call, rows, dtype):
    assert found(call, (rows, 3), dtype=dtype) == Finding({0}, set())


@both_types
def test_what_rules_give_is_proved(dtype):
    def call(x: Tensor, w: Tensor, b: Tensor, k: Tensor) -> Tensor:
        return F.conv1d(F.linear(x, w, b).tanh()[:, None], k).sin().sum((1, 2))

    assert found(call, (4, 3), (4,), (1, 1, 3), dtype=dtype) == Finding(set(), set())


@both_types
def test_a_bias_before_a_normalisation_has_nothing_but_rounding_errors(dtype):
    def call(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        windows = 1e3 * torch.randn(M, 2, 50, dtype=dtype)
        return F.instance_norm(F.conv1d(windows, w, b)).tanh().sum((1, 2))

    assert found(call, (4, 2, 3), (4,), dtype=dtype) == Finding(set(), {1})


def test_gradients_that_are_nan_prove_nothing():
    """They have an error of their own, which names the data or the loss."""
    finding = found(
        lambda x, w: (F.linear(x, w) * torch.zeros(M, 1)).abs().sqrt().sum(1), (2, 3), dtype=torch.float64
    )
    assert finding == Finding(set(), {0})


def test_a_head_of_zeros_proves_nothing_of_the_layers_below():
    proofs, model = Proofs(), nn.Identity()
    w = torch.randn(3, 3).double().requires_grad_()
    for head, wrong in ((0.0, set()), (0.0, set()), (1.0, {0})):  # found out as soon as the head is trained
        h = torch.full((1, 1), head).double().requires_grad_()
        recorder, outputs = recorded(lambda x, w, h: F.linear(gradient_inside(x, w)[:, None], h)[:, 0], w, h)
        served = recorder.served(M)

        def look(seed: int, recorder=recorder, served=served, outputs=outputs) -> Finding:
            return recorder.examined(served, outputs, seed)

        assert served.keys() - proofs.proved(model, "layout", served, look, "y").keys() == wrong


@pytest.mark.parametrize(
    ("unproven", "examined"), [(set(), [1, 2, 4, 8, 16]), ({0}, [1, 2, 3, 4, 5, 6, 7, 8, 16])]
)
def test_calls_in_which_a_layout_is_examined(unproven, examined):
    proofs, model, calls = Proofs(), nn.Identity(), list[int]()

    for n in range(1, 20):

        def look(seed: int, n: int = n) -> Finding:
            calls.append(n)
            return Finding(set(), unproven)

        proofs.proved(model, "layout", {}, look, "y")
    assert calls == examined


def test_what_was_proved_and_holds_no_longer_is_an_error():
    proofs, model = Proofs(), nn.Identity()

    def ask(wrong: set[int], unproven: set[int]) -> set[int]:
        uses: dict = {0: [], 1: [], 2: []}
        return uses.keys() - proofs.proved(model, "layout", uses, lambda seed: Finding(wrong, unproven), "y")

    assert ask({1}, {2}) == {1}
    assert ask({1, 2}, set()) == {1, 2}
    assert ask({0}, set()) == {1, 2}  # the third call is not examined
    with pytest.raises(ModelError, match="examples of observed site 'y'"):
        ask({0}, set())
