# SPDX-License-Identifier: Apache-2.0
r"""Per-example gradients of dense layers and products, :math:`g_i = \sum_t \delta_{it} x_{it}^\top`.

With one row per example, :math:`\sum_i g_i^2 = (\delta^2)^\top x^2`, so no gradients are formed. With a few rows t, the
square of the sum is expanded into pairs of rows, which again needs only a single product. With many rows, gradients are
formed for a few examples at a time.

For embedding tables, gradients of repeated tokens within an example are summed before squaring.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.curvature.per_example.broadcasting import is_broadcast, rows_summed_to, shift
from pyro_dvi.curvature.per_example.example_rules import Contribution, Outer, per_example_rule, summed_squares
from pyro_dvi.errors import UnsupportedError

_MAX_ROWS_IN_PAIRS = 4


def _rows(x: Tensor) -> Tensor:
    """Return ``[M, ..., n]`` as ``[M, rows, n]``."""
    return x.reshape(len(x), -1, x.shape[-1])


def summed_outer_squares(left: Tensor, right: Tensor) -> Tensor:
    r"""Return :math:`\sum_i \bigl(\sum_t a_{it} b_{it}^\top\bigr)^2` of shape ``[p, q]``.

    Args:
        left: a, of shape ``[M, T, p]``.
        right: b, of shape ``[M, T, q]``.
    """
    rows = left.shape[1]
    if rows == 1:
        return left[:, 0].square().mT @ right[:, 0].square()
    if rows <= _MAX_ROWS_IN_PAIRS:
        first, second = torch.triu_indices(rows, rows, device=left.device)
        twice = torch.where(first == second, 1.0, 2.0).to(left).unsqueeze(-1)
        a = (left[:, first] * left[:, second] * twice).flatten(0, 1)
        return a.mT @ (right[:, first] * right[:, second]).flatten(0, 1)
    shape = torch.Size((left.shape[-1], right.shape[-1]))
    return summed_squares(left.mT, right, lambda part: part, shape)


def _products(x: Tensor, inputs_first: bool = False) -> Contribution:
    """Return the contribution to a matrix that multiplies x, of shape ``[out, in]`` or ``[in, out]``."""

    def gradients(delta: Tensor, x: Tensor) -> Tensor:
        return _rows(x).mT @ _rows(delta) if inputs_first else _rows(delta).mT @ _rows(x)

    def sum_of_squares(delta: Tensor, x: Tensor) -> Tensor:
        left, right = (x, delta) if inputs_first else (delta, x)
        return summed_outer_squares(_rows(left), _rows(right))

    return Contribution(gradients, (x,), sum_of_squares, Outer(_rows, _rows, inputs_first))


@per_example_rule(F.linear)
def _linear(wanted: str, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Contribution | None:
    if input.dim() < 2:  # a single row: the first dimension of the output is features
        return None
    if wanted == "bias":
        assert bias is not None
        return shift(bias.shape, input)
    return _products(input) if wanted == "weight" and weight.dim() == 2 else None


@per_example_rule(
    torch.matmul,
    torch.mm,
    torch.mv,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.Tensor.mm,
    torch.Tensor.mv,
)
def _matmul(
    wanted: str, input: Tensor, other: Any = None, mat2: Any = None, vec: Any = None
) -> Contribution | None:
    other = next(value for value in (other, mat2, vec) if value is not None)
    if wanted != "input":  # x @ w
        if input.dim() < 2:
            return None
        if other.dim() == 1:
            outer = Outer(_rows, lambda delta: delta.reshape(len(delta), -1, 1))
            return Contribution(
                lambda delta, x: (_rows(x) * delta.reshape(len(x), -1, 1)).sum(1), (input,), outer=outer
            )
        if other.dim() == 2:
            return _products(input, inputs_first=True)
        if not is_broadcast(other.shape, input.shape):
            return None
        return Contribution(lambda delta, x: rows_summed_to(x.mT @ delta, other.shape), (input,))
    if other.dim() < 3 or not is_broadcast(input.shape, other.shape):  # w @ x, where x has the examples
        return None
    if input.dim() == 1:
        return Contribution(
            lambda delta, x: rows_summed_to((x @ delta.unsqueeze(-1)).squeeze(-1), input.shape), (other,)
        )
    return Contribution(lambda delta, x: rows_summed_to(delta @ x.mT, input.shape), (other,))


@per_example_rule(torch.addmm, torch.Tensor.addmm)
def _addmm(
    wanted: str, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Contribution | None:
    if wanted == "mat2":
        return _products(mat1 if alpha == 1 else alpha * mat1, inputs_first=True)
    if wanted == "input" and is_broadcast(input.shape, mat1.shape):
        return shift(input.shape, mat1, beta)
    return None


@per_example_rule(torch.einsum)
def _einsum(wanted: str, equation: str, *operands: Tensor) -> Contribution | None:
    left, arrow, output = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    k = int(wanted.removeprefix("operands"))
    if not arrow or "." in equation or len(terms) != 2 or len(operands) != 2:
        return None
    weight, x = terms[k], terms[1 - k]
    known = all(len(set(term)) == len(term) for term in terms) and set(weight) <= {*output, *x}
    if not known or x[:1] != output[:1] or x[:1] in weight or operands[1 - k].dim() != len(x):
        return None
    pullback = f"{output},{x}->{output[0]}{weight}"
    return Contribution(lambda delta, x: torch.einsum(pullback, delta, x), (operands[1 - k],))


def _without_padding(delta: Tensor, tokens: Tensor, padding_idx: int | None, size: int) -> Tensor:
    """Return gradients as ``[M, T, d]``, zero at padding tokens."""
    delta = delta.reshape(*tokens.shape, delta.shape[-1])
    if padding_idx is None:
        return delta
    return delta * (tokens != padding_idx % size).unsqueeze(-1)


@per_example_rule(F.embedding)
def _embedding(
    wanted: str,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Contribution | None:
    if sparse:
        raise UnsupportedError(
            "latent embeddings have no sparse gradients, because the prior changes every entry: use sparse=False"
        )
    if wanted != "weight" or input.dim() < 1 or max_norm is not None or scale_grad_by_freq:
        return None
    shape = weight.shape

    def gradients(delta: Tensor, tokens: Tensor) -> Tensor:
        delta = _without_padding(delta, tokens, padding_idx, shape[0])
        index = tokens.unsqueeze(-1).expand_as(delta)
        return delta.new_zeros(len(tokens), *shape).scatter_add(1, index, delta)

    def sum_of_squares(delta: Tensor, tokens: Tensor) -> Tensor:
        """Sum within (example, token), then square; memory is proportional to the tokens, not to the table."""
        delta = _without_padding(delta, tokens, padding_idx, shape[0]).flatten(0, 1)
        examples = torch.arange(len(tokens), device=tokens.device).unsqueeze(-1)
        keys, order = (examples * shape[0] + tokens).flatten().sort()
        starts = torch.ones_like(keys)
        starts[1:] = keys[1:] != keys[:-1]
        segment = starts.cumsum(0) - 1
        sums = torch.zeros_like(delta).index_add_(0, segment, delta[order])
        token = torch.zeros_like(keys).scatter_(0, segment, keys % shape[0])
        return delta.new_zeros(shape).index_add_(0, token, sums.square_())

    return Contribution(gradients, (input.reshape(len(input), -1),), sum_of_squares)
