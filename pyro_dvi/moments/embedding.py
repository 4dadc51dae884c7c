# SPDX-License-Identifier: Apache-2.0
"""Rows of an uncertain table."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments.dispatch import Kind
from pyro_dvi.moments.rules import moment_rule
from pyro_dvi.moments.value import GaussianMoments


@moment_rule(F.embedding, kind=Kind.REARRANGEMENT)
def embedding(
    input: Tensor,
    weight: GaussianMoments,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> GaussianMoments:
    """Moments of the rows of a table. Status: exact marginals; a row that occurs twice counts as two.

    Raises:
        UnsupportedError: ``max_norm``, which changes the table in place.
    """
    _refuse_max_norm(F.embedding, max_norm)
    options: dict[str, Any] = {"scale_grad_by_freq": scale_grad_by_freq, "sparse": sparse}
    return GaussianMoments(
        F.embedding(input, weight.loc, padding_idx, **options),
        F.embedding(input, weight.variance, padding_idx, **options),
    )


@moment_rule(F.embedding_bag)
def embedding_bag(
    input: Tensor,
    weight: GaussianMoments,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> GaussianMoments:
    r"""Moments of sums or means of rows.

    A row that occurs n times in a bag is the same row each time: with :math:`c_r` the sum of its factors (weights,
    or one over the size of the bag), :math:`\mathrm{Var} = \sum_r c_r^2 \mathrm{Var}[w_r]`.

    Status: exact for an uncertain table.

    Raises:
        UnsupportedError: ``mode="max"``, ``max_norm``, or uncertain ``per_sample_weights``.
    """
    _refuse_max_norm(F.embedding_bag, max_norm)
    if mode == "max":
        raise UnsupportedError('F.embedding_bag(mode="max") of moments has no rule: use mode "mean" or "sum"')
    if isinstance(per_sample_weights, GaussianMoments):
        raise UnsupportedError("F.embedding_bag has no rule for uncertain per_sample_weights")
    options: dict[str, Any] = {"include_last_offset": include_last_offset, "padding_idx": padding_idx}
    loc = F.embedding_bag(
        input, weight.loc, offsets, mode=mode, per_sample_weights=per_sample_weights, sparse=sparse, **options
    )
    if input.dim() == 2:
        bags = torch.arange(len(input), device=input.device).repeat_interleave(input.shape[1])
    else:
        assert offsets is not None  # or F.embedding_bag would have refused
        positions = torch.arange(len(input), device=input.device)
        bags = torch.searchsorted(offsets, positions, right=True) - 1
    rows = input.flatten()
    if per_sample_weights is not None:
        factors = per_sample_weights.flatten()
    else:
        factors = torch.ones_like(rows, dtype=loc.dtype)
    if padding_idx is not None:
        factors = factors * (rows != padding_idx % weight.shape[0])
    if mode == "mean":
        sizes = factors.new_zeros(len(loc)).index_add(0, bags, factors)
        factors = factors / sizes[bags].clamp_min(1)
    _, which = torch.unique(bags * weight.shape[0] + rows, return_inverse=True)
    totals = torch.zeros_like(factors).index_add(0, which, factors)
    # The factors of a row add to its total, so these add to its square.
    squares = (factors * totals[which]).reshape(input.shape)
    variance = F.embedding_bag(
        input, weight.variance, offsets, mode="sum", per_sample_weights=squares, **options
    )
    return GaussianMoments(loc, variance)


def _refuse_max_norm(function: Any, max_norm: float | None) -> None:
    if max_norm is not None:
        raise UnsupportedError(
            f"F.{function.__name__}(max_norm=...) changes its table in place, which has no rule for moments: normalise "
            "the table in the model instead"
        )
