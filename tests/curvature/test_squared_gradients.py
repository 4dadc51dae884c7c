# SPDX-License-Identifier: Apache-2.0
"""Sums of squares from one backward pass against a plain loop over examples."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pyro_dvi.curvature.per_example.dense import summed_outer_squares
from pyro_dvi.curvature.per_example.proof import examined
from pyro_dvi.curvature.products import LinearMap
from pyro_dvi.curvature.squared_gradients import (
    SquaredGradients,
    _divided,
    squares_without_rules,
)
from pyro_dvi.errors import UnsupportedError
from tests.curvature.per_example_cases import CASES, Case, M, head, loop

pytestmark = pytest.mark.filterwarnings("ignore:Using padding=.same.:UserWarning")
every_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
TOLERANCE = {"atol": 1e-10, "rtol": 1e-10}


def recorded(case: Case) -> tuple[SquaredGradients, Tensor, list[Tensor], list[Tensor]]:
    """What a run leaves, and the answer."""
    x, weights = case.inputs()
    recorder = SquaredGradients(weights)
    with recorder:
        outputs = case.call(x, *weights)
    cotangent = torch.linspace(0.5, 1.5, M, dtype=torch.float64)
    exact = loop(case.call, x, weights, cotangent)
    return recorder, outputs, weights, exact


@every_case
def test_squares_are_those_of_a_loop(case):
    """From a pass of their own, without rules, and from the backward pass that gives the gradients."""
    recorder, outputs, weights, exact = recorded(case)
    cotangent = torch.linspace(0.5, 1.5, M, dtype=torch.float64)
    exact = [squares.detach() for squares in exact]
    served = recorder.served(M)
    assert [k in served for k in range(len(weights))] == list(case.covered or (True,) * len(weights))
    examples = recorder.examined(served, outputs)
    assert examples.wrong == set()
    served = examples.kept(served)
    for k, squares in recorder.measured(served, outputs, cotangent).items():
        torch.testing.assert_close(squares, exact[k], **TOLERANCE)
    if not case.heavy:
        torch.testing.assert_close(squares_without_rules(outputs, cotangent, weights), exact, **TOLERANCE)
    found: dict[int, Tensor] = {}
    recorder.watch(served, found.__setitem__)
    outputs.backward(cotangent)
    assert found.keys() == served.keys()
    for k, squares in found.items():
        torch.testing.assert_close(squares, exact[k], **TOLERANCE)


@every_case
def test_gradients_of_examples_add_up_to_the_gradient(case):
    x, weights = case.inputs()
    recorder = SquaredGradients(weights)
    with recorder:
        outputs = case.call(x, *weights)
    served = recorder.served(M)
    if not served:
        return
    served = recorder.examined(served, outputs).kept(served)
    edges = [use.output for uses in served.values() for use in uses]
    deltas = iter(torch.autograd.grad(outputs.sum(), edges, retain_graph=True, allow_unused=True))
    for k, uses in served.items():
        reached = [(use, delta) for use in uses if (delta := next(deltas)) is not None]
        parts = [use.contribution.gradients(use.arranged(delta)) for use, delta in reached]
        assert all(part.shape == (M, *weights[k].shape) for part in parts)
        (whole,) = torch.autograd.grad(outputs.sum(), weights[k], retain_graph=True)
        torch.testing.assert_close(torch.stack(parts).sum((0, 1)), whole, **TOLERANCE)


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 9])
@pytest.mark.parametrize("size", [3, 800])
def test_sums_of_outer_products(rows, size):
    left, right = torch.randn(4, rows, size).double(), torch.randn(4, rows, size + 1).double()
    expected = (left.mT @ right).square().sum(0)
    torch.testing.assert_close(summed_outer_squares(left, right), expected, **TOLERANCE)


def test_few_elements_and_many():
    x = torch.randn(150, 40, dtype=torch.float64)
    w = torch.randn(40, dtype=torch.float64, requires_grad=True)
    s = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)

    def call(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return torch.tanh(torch.einsum("bi,i->b", x, w) / s.exp()) - s

    outputs, cotangent = call(x, w, s), torch.rand(150, dtype=torch.float64)
    exact = loop(call, x, [w, s], cotangent)
    squares = squares_without_rules(outputs, cotangent, [w, s])
    torch.testing.assert_close(squares, [e.detach() for e in exact], **TOLERANCE)


class Once(torch.autograd.Function):
    """Can neither be vectorised nor differentiated twice."""

    @staticmethod
    def forward(ctx, x, s):
        ctx.save_for_backward(x, s)
        return x * s

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, delta):
        x, s = ctx.saved_tensors
        if delta.dim() > x.dim() or torch._C._functorch.is_batchedtensor(delta):
            raise RuntimeError("cannot be vectorised")
        return None, (delta * x).sum()


def test_functions_that_cannot_be_vectorised():
    x = torch.randn(20, dtype=torch.float64)
    s = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    squares = squares_without_rules(Once.apply(x, s), torch.ones_like(x), [s])
    torch.testing.assert_close(squares, [x.square().sum()])


def test_products_with_the_jacobian_refuse_functions_that_cannot_be_differentiated_twice():
    x = torch.randn(20, dtype=torch.float64)
    s = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    with pytest.raises(UnsupportedError, match="differentiate the model more than once"):
        LinearMap(Once.apply(x, s), [s]).forward([torch.ones(1, dtype=torch.float64)])


# Rows that are no examples --------------------------------------------------------------------------------------


def test_positions_as_many_as_examples_are_told_from_examples():
    """A sequence-first layer: its first dimension has M entries by coincidence; the proof finds the second."""
    x, w = torch.randn(M, M, 3).double(), torch.randn(3, 3).double().requires_grad_()
    recorder = SquaredGradients([w])
    with recorder:
        outputs = head(F.linear(x.transpose(0, 1), w).transpose(0, 1))
    found = recorder.examined(recorder.served(M), outputs)
    assert found.wrong == set()
    assert [rows.axis for rows in found.rows[0]] == [1]


def test_features_as_many_as_examples_are_found_out():
    """Weights of a non-centred prior, m + s z with M rows of outputs: rows of z are no examples."""
    x, z = torch.randn(M, 3).double(), torch.randn(M, 3).double().requires_grad_()
    m = torch.randn(3).double().requires_grad_()
    recorder = SquaredGradients([m, z])
    with recorder:
        outputs = head(F.linear(x, m + z))
    assert recorder.served(M).keys() == {0}
    assert recorder.examined(recorder.served(M), outputs).wrong == {0}


@pytest.mark.parametrize("shift", [1, 2, 3, -1])
def test_rows_that_see_their_neighbours_are_found_out(shift):
    """An example that reads the row of another: to the left or right, near or far, at the ends or round the corner."""
    x, w = torch.randn(M, 3).double(), torch.randn(3, 3).double().requires_grad_()
    for neighbours in (torch.roll(torch.arange(M), shift), (torch.arange(M) + shift).clamp(0, M - 1)):
        recorder = SquaredGradients([w])
        with recorder:
            h = F.linear(x, w)
            outputs = head(h + h[neighbours])
        assert recorder.examined(recorder.served(M), outputs).wrong == {0}


def test_constant_statistics_tell_mixed_rows_from_batch_norm():
    x, w, a = torch.randn(M, M, 3).double(), torch.randn(2, 3).double(), torch.rand(2).double()
    w.requires_grad_(), a.requires_grad_()
    for transposed in (False, True):
        recorder = SquaredGradients([w, a])
        with recorder:
            h = F.linear(x.transpose(0, 1), w).transpose(0, 1) if transposed else F.linear(x, w)
            h = torch.batch_norm(h.mean(1), None, None, None, None, True, 0.1, 1e-5, False)
            h = F.batch_norm(h + h**2, None, None, a, training=True)
            outputs = h.tanh().sum(1)
        assert recorder.examined(recorder.served(M), outputs).wrong == set()
        assert examined(recorder.served(M), recorder.values, outputs).wrong == {0}


# Graphs ---------------------------------------------------------------------------------------------------------


def test_batch_norm_in_training_mode_counts_its_own_rows():
    x = torch.randn(M, 3).double()
    w, a = torch.randn(2, 3).double().requires_grad_(), torch.rand(2).double().requires_grad_()
    recorder = SquaredGradients([w, a])
    with recorder:
        h = F.linear(x, w)
        normalised = F.batch_norm(h, None, None, a, training=True)
        outputs = normalised.tanh().sum(1)
    of_h, of_output = torch.autograd.grad(outputs.sum(), [h, normalised], retain_graph=True)
    expected_w = torch.einsum("bo,bi->boi", of_h, x).square().sum(0)
    expected_a = (of_output * F.batch_norm(h, None, None, training=True)).square().sum(0)
    found: dict[int, Tensor] = {}
    recorder.watch(recorder.served(M), found.__setitem__)
    outputs.sum().backward()
    torch.testing.assert_close(found, {0: expected_w, 1: expected_a.detach()})


def test_gradients_through_batch_norm_keep_their_dtype():
    """On a GPU, ``rsqrt`` under autocast gives float32 for bfloat16, and a hook must return what it replaces."""
    x, of_output = torch.randn(M, 2, dtype=torch.bfloat16), torch.randn(M, 2)
    of_input, of_weight = _divided(x, (of_output.bfloat16(), torch.ones(2)), (of_output,))
    assert of_input.dtype == torch.bfloat16 and of_weight.dtype == torch.float32


def test_the_graph_is_freed_after_the_backward_pass():
    x, w = torch.randn(M, 3), torch.randn(3, 3, requires_grad=True)
    b = torch.zeros(3, requires_grad=True)
    recorder = SquaredGradients([w, b])
    with recorder:
        h = F.linear(x, w)
        h += b
        outputs = head(F.relu(h, inplace=True))
    alive = weakref.ref(h)
    recorder.watch(recorder.served(M), lambda k, squares: None)
    gc.disable()
    try:
        outputs.sum().backward()
        del outputs, h
        assert alive() is None
    finally:
        gc.enable()


def test_checkpointed_layers():
    x, w = torch.randn(M, 3).double(), torch.randn(3, 3).double().requires_grad_()

    def layers(h: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(h, w)), w)

    exact = loop(lambda x, w: head(layers(x)), x, [w], torch.ones(M))
    recorder = SquaredGradients([w])
    with recorder:
        outputs = head(checkpoint(layers, x, use_reentrant=False))
    found: dict[int, Tensor] = {}
    recorder.watch(recorder.served(M), found.__setitem__)
    outputs.sum().backward()
    torch.testing.assert_close(found[0], exact[0].detach(), **TOLERANCE)


def test_half_precision_layers():
    x, w = torch.randn(M, 3), torch.randn(3, 3, requires_grad=True)
    exact = loop(lambda x, w: head(F.linear(F.silu(F.linear(x, w)), w)), x, [w], torch.ones(M))
    recorder = SquaredGradients([w])
    with torch.autocast("cpu", dtype=torch.bfloat16), recorder:
        outputs = head(F.linear(F.silu(F.linear(x, w)), w).float())
    found: dict[int, Tensor] = {}
    recorder.watch(recorder.served(M), found.__setitem__)
    outputs.sum().backward()
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(found[0], exact[0].detach(), rtol=0.1, atol=0.05 * exact[0].max().item())
