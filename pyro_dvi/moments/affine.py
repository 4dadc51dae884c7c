# SPDX-License-Identifier: Apache-2.0
"""Linear layers and matrix products."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments.bilinear import MultiplicativeMoments, bilinear_moments
from pyro_dvi.moments.rules import moment_rule
from pyro_dvi.moments.value import GaussianMoments, second_moment_of


@moment_rule(F.linear)
def linear(input: Any, weight: Any, bias: Any = None) -> GaussianMoments:
    r"""Moments of :math:`xW^\top + b`.

    Status: exact for independent inputs and weights (:mod:`pyro_dvi.moments.bilinear`).

    Args:
        input: ``[*, in]``.
        weight: ``[out, in]``.
        bias: ``[out]``.

    Source: Schmitt & Roth (2021), Eq. 9.

    Example:
        >>> x, weight = (
        ...     torch.ones(1, 4),
        ...     MultiplicativeMoments(torch.ones(1, 4), torch.full((1, 4), 0.1)),
        ... )
        >>> F.linear(x, weight)
        GaussianMoments(loc=tensor([[4.]]), variance=tensor([[0.4000]]))
    """
    if isinstance(weight, GaussianMoments) or isinstance(input, GaussianMoments):
        return bilinear_moments(F.linear, input, weight, _alpha_of_columns(weight), bias)
    return GaussianMoments(F.linear(input, weight, bias.loc), bias.variance)


@moment_rule(torch.matmul, torch.mm, torch.bmm, torch.mv)
def matmul(input: Any, *factor: Any, **named: Any) -> GaussianMoments:
    r"""Moments of the matrix product :math:`XW`, for all the shapes that :func:`torch.matmul` accepts.

    Status: exact for independent factors, one or both uncertain, batched or not.

    Args:
        input: ``[*, M, d]`` or ``[d]``.
        factor: ``[*, d, n]`` or ``[d]``.
        named: the second factor, if it is passed by keyword (``other``, ``mat2`` or ``vec``).

    Raises:
        UnsupportedError: for the product of a matrix with itself, whose factors are not independent.

    Example:
        >>> x = GaussianMoments(torch.tensor([1.0, 2.0]), torch.tensor([0.1, 0.1]))
        >>> x @ torch.ones(2, 1)
        GaussianMoments(loc=tensor([3.]), variance=tensor([0.2000]))
    """
    (other,) = (*factor, *named.values())
    if input is other and input.dim() == 1:
        return dot(input, other)
    return bilinear_moments(torch.matmul, input, other)


@moment_rule(torch.dot)
def dot(input: Any, tensor: Any) -> GaussianMoments:
    r"""Moments of :math:`\sum_i x_i y_i`.

    Status: exact for independent factors, and for ``dot(x, x)``: :math:`\sum_i 2 v_i^2 + 4 m_i^2 v_i`.
    """
    if input is tensor:
        loc, variance = input.loc, input.variance
        return GaussianMoments(
            second_moment_of(input).sum(), torch.dot(variance, 2 * variance + 4 * loc * loc)
        )
    return bilinear_moments(torch.dot, input, tensor)


@moment_rule(torch.addmm, torch.baddbmm, torch.addmv)
def add_product(input: Any, *factors: Any, beta: Any = 1, alpha: Any = 1, **named: Any) -> GaussianMoments:
    r"""Moments of :math:`\beta\,\mathrm{input} + \alpha\,AB`. Status: exact for independent arguments."""
    # mat1 and mat2, batch1 and batch2, mat and vec
    first, second = (*factors, *(named[name] for name in sorted(named)))
    is_uncertain = isinstance(first, GaussianMoments) or isinstance(second, GaussianMoments)
    product = matmul(first, second) if is_uncertain else torch.matmul(first, second)
    return input * beta + product * alpha


@moment_rule(torch.einsum)
def einsum(equation: str, *operands: Any) -> GaussianMoments:
    r"""Moments of sums of products of one or two operands.

    Status: exact for independent operands. An index that occurs in one operand only is summed first, so that no
    uncertain element occurs twice in a sum.

    Raises:
        UnsupportedError: for more than two operands, the same uncertain operand twice, or a sum over an ellipsis.

    Example:
        >>> x = GaussianMoments(torch.ones(2, 3), torch.ones(2, 3))
        >>> torch.einsum("ij,j->i", x, torch.tensor([1.0, 2.0, 3.0])).variance
        tensor([14., 14.])
    """
    terms, output = _subscripts(equation, operands)
    reduced = []
    for k, (term, operand) in enumerate(zip(terms, operands, strict=True)):
        others = output + "".join(terms[:k] + terms[k + 1 :])
        # Make each index unique: take diagonals, and sum over indices that occur nowhere else.
        kept = "".join(i for i in dict.fromkeys(term.replace("...", "")) if i in others)
        kept = "..." + kept if "..." in term else kept
        if kept != term:
            operand = _linear_in_one(partial(torch.einsum, f"{term}->{kept}"), operand)
        terms[k] = kept
        reduced.append(operand)
    product = partial(torch.einsum, f"{','.join(terms)}->{output}")
    if len(reduced) == 1:
        return _linear_in_one(product, reduced[0])
    return bilinear_moments(product, *reduced)


def _subscripts(equation: str, operands: tuple) -> tuple[list[str], str]:
    """Split an equation into its terms; raise an error if the rule does not cover it."""
    left, arrow, output = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    letters = left.replace("...", "").replace(",", "")
    if not arrow:
        output = "..." if "..." in left else ""
        output += "".join(sorted(i for i in set(letters) if letters.count(i) == 1))
    reason = None
    if len(operands) > 2:
        reason = "more than two operands: contract two at a time"
    elif len(operands) == 2 and operands[0] is operands[1]:
        reason = (
            "the same uncertain operand twice, which is not independent of itself: use x.square() and a sum"
        )
    elif "..." in left and "..." not in output:
        reason = "a sum over an ellipsis: name its indices"
    elif _sizes_differ(terms, operands):
        reason = "an index of size 1 in one operand and larger in another: expand the operand first"
    if reason is not None:
        raise UnsupportedError(f'torch.einsum("{equation}") of moments has no rule for {reason}.')
    return terms, output


def _sizes_differ(terms: list[str], operands: tuple) -> bool:
    """Return True if broadcasting an index would repeat an element; the rule would treat copies as independent."""
    sizes: dict[str, int] = {}
    for term, operand in zip(terms, operands, strict=True):
        before, _, after = term.partition("...")
        pairs = [*zip(before, operand.shape, strict=False)]
        pairs += zip(reversed(after), reversed(operand.shape), strict=False)
        if any(sizes.setdefault(index, size) != size for index, size in pairs):
            return True
    return False


def _linear_in_one(function: Any, x: Any) -> Any:
    """Sum or rearrange elements, each of which enters an output at most once."""
    if not isinstance(x, GaussianMoments):
        return function(x)
    return GaussianMoments(function(x.loc), function(x.variance))


def _alpha_of_columns(weight: Any) -> Tensor | None:
    """Return the relative variances as one row, if all rows of a weight share them (``[1, in]``); otherwise None."""
    if not isinstance(weight, MultiplicativeMoments):
        return None
    alpha = weight.alpha
    if alpha.dim() < 2:
        return alpha if weight.dim() <= 2 else None
    return alpha.squeeze(-2) if alpha.shape[-2] == 1 and alpha.dim() == weight.dim() == 2 else None
