# SPDX-License-Identifier: Apache-2.0
r"""Per-example gradients of dense layers and products, :math:`g_i = \sum_t \delta_{it} x_{it}^\top`.

One row for each example needs no gradients to be formed: :math:`\sum_i g_i^2 = (\delta^2)^\top x^2`. With a few rows
t, the square of the sum is expanded into pairs of rows, which is one product too; with many, gradients are formed for
a few examples at a time.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.curvature.per_example.broadcasting import is_broadcast, rows_summed_to, shift_outer
from pyro_dvi.curvature.per_example.uses import OfDelta, Outer, outer_rule, per_example_rule, squares_rule

__all__ = ["summed_outer_squares"]

_MATMULS = (
    torch.matmul,
    torch.mm,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.Tensor.mm,
)
_MAX_ROWS_IN_PAIRS = 4
_BUDGET = 1 << 19  # entries of per-example gradients at a time: about a processor's cache


def _rows(x: Tensor) -> Tensor:
    """``[M, ..., n]`` as ``[M, rows, n]``."""
    return x.reshape(len(x), -1, x.shape[-1])


def summed_outer_squares(left: Tensor, right: Tensor) -> Tensor:
    r"""Return :math:`\sum_i \bigl(\sum_t a_{it} b_{it}^\top\bigr)^2` of shape ``[p, q]``.

    Args:
        left: a, of shape ``[M, T, p]``.
        right: b, of shape ``[M, T, q]``.
    """
    examples, rows = left.shape[:2]
    size = left.shape[-1] * right.shape[-1]
    if rows == 1:
        return left[:, 0].square().mT @ right[:, 0].square()
    if rows <= _MAX_ROWS_IN_PAIRS:
        first, second = torch.triu_indices(rows, rows, device=left.device)
        twice = torch.where(first == second, 1.0, 2.0).to(left).unsqueeze(-1)
        a = (left[:, first] * left[:, second] * twice).flatten(0, 1)
        return a.mT @ (right[:, first] * right[:, second]).flatten(0, 1)
    chunk = max(1, (_BUDGET if left.device.type == "cpu" else 128 * _BUDGET) // size)
    total = left.new_zeros(left.shape[-1], right.shape[-1])
    if chunk == 1:
        buffer = torch.empty_like(total)
        for a, b in zip(left, right, strict=True):
            torch.mm(a.mT, b, out=buffer)
            total.addcmul_(buffer, buffer)
        return total
    for start in range(0, examples, chunk):
        part = slice(start, start + chunk)
        total += torch.bmm(left[part].mT, right[part]).square_().sum(0)
    return total


@per_example_rule(F.linear)
def _linear(wanted: str, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> OfDelta | None:
    if input.dim() < 2:  # a single row: the output's first dimension is that of the layer
        return None
    if wanted == "weight" and weight.dim() == 2:
        return lambda delta: _rows(delta).mT @ _rows(input)
    if wanted == "bias":
        assert bias is not None
        shape = bias.shape
        return lambda delta: rows_summed_to(delta, shape)
    return None


@squares_rule(F.linear)
def _linear_squares(wanted: str, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> OfDelta | None:
    return (lambda delta: summed_outer_squares(_rows(delta), _rows(input))) if wanted == "weight" else None


@outer_rule(F.linear)
def _linear_outer(wanted: str, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Outer | None:
    if wanted == "bias" and bias is not None and bias.dim() == 1:
        return shift_outer(input, len(bias))
    return Outer(lambda part: _rows(input[part]), _rows) if wanted == "weight" else None


@per_example_rule(*_MATMULS)
def _matmul(wanted: str, input: Tensor, other: Tensor) -> OfDelta | None:
    if wanted == "other":  # x @ w
        if input.dim() < 2:
            return None
        if other.dim() == 1:
            return lambda delta: (_rows(input) * delta.reshape(len(input), -1, 1)).sum(1)
        if other.dim() == 2:
            return lambda delta: _rows(input).mT @ _rows(delta)
        if not is_broadcast(other.shape, input.shape):
            return None
        return lambda delta: rows_summed_to(input.mT @ delta, other.shape)
    if other.dim() < 3 or not is_broadcast(input.shape, other.shape):  # w @ x, where x has the examples first
        return None
    if input.dim() == 1:
        return lambda delta: rows_summed_to((other @ delta.unsqueeze(-1)).squeeze(-1), input.shape)
    return lambda delta: rows_summed_to(delta @ other.mT, input.shape)


@squares_rule(*_MATMULS)
def _matmul_squares(wanted: str, input: Tensor, other: Tensor) -> OfDelta | None:
    if wanted == "other" and other.dim() == 2:
        return lambda delta: summed_outer_squares(_rows(input), _rows(delta))
    return None


@outer_rule(*_MATMULS)
def _matmul_outer(wanted: str, input: Tensor, other: Tensor) -> Outer | None:
    if wanted != "other":
        return None
    if other.dim() == 1:
        return Outer(lambda part: _rows(input[part]), lambda delta: delta.reshape(len(delta), -1, 1))
    return Outer(lambda part: _rows(input[part]), _rows, inputs_first=True) if other.dim() == 2 else None


@per_example_rule(torch.addmm, torch.Tensor.addmm)
def _addmm(wanted: str, input: Tensor, mat1: Tensor, mat2: Tensor) -> OfDelta | None:
    if wanted == "mat2":
        return lambda delta: mat1.unsqueeze(-1) * delta.unsqueeze(-2)
    if wanted == "input" and is_broadcast(input.shape, mat1.shape):
        return lambda delta: rows_summed_to(delta, input.shape)
    return None


@outer_rule(torch.addmm, torch.Tensor.addmm)
def _addmm_outer(wanted: str, input: Tensor, mat1: Tensor, mat2: Tensor) -> Outer | None:
    if wanted == "mat2":
        return Outer(lambda part: _rows(mat1[part]), _rows, inputs_first=True)
    return shift_outer(mat1, len(input)) if wanted == "input" and input.dim() == 1 else None


@per_example_rule(F.bilinear)
def _bilinear(
    wanted: str, input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None
) -> OfDelta | None:
    if input1.dim() < 2:
        return None
    if wanted == "weight":
        return lambda delta: torch.einsum("bto,bti,btj->boij", _rows(delta), _rows(input1), _rows(input2))
    if wanted == "bias":
        return lambda delta: _rows(delta).sum(1)
    return None
