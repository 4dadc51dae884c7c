# SPDX-License-Identifier: Apache-2.0
r"""Convolutions, embeddings and dropout.

**Convolutions** and their transposes are bilinear (:mod:`pyro_dvi.moments.bilinear`). Their moments are exact for
independent inputs and weights, with every stride, padding, dilation and number of groups. Outputs at different
positions share weights and are correlated; the next layer takes them as independent.

**Dropout** in training multiplies by noise of known moments. With the mask :math:`b \sim \mathrm{Bernoulli}(1 - p)`,
independent of x,

.. math:: \mathrm E\Bigl[\frac{b x}{1 - p}\Bigr] = m, \qquad \mathrm{Var} = \frac{v + p m^2}{1 - p}.

No mask is drawn, and the marginals over mask and x are exact. Channels that drop out together are taken as independent.

Source: Schmitt & Roth (2021), Eq. 9.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.errors import ArgumentError, UnsupportedError
from pyro_dvi.moments.bilinear import Gradients, Layer, MultiplicativeMoments, bilinear_moments
from pyro_dvi.moments.dispatch import Kind
from pyro_dvi.moments.rules import moment_rule
from pyro_dvi.moments.value import GaussianMoments, loc_of

_DEFAULTS = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
_TRANSPOSED = {"stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}


def _convolution(function: Callable[..., Tensor], dims: int) -> Callable[..., GaussianMoments]:
    transposed = "transpose" in function.__name__
    defaults = _TRANSPOSED if transposed else _DEFAULTS

    def convolution(
        input: Any, weight: Any, bias: Any = None, *options: Any, **named: Any
    ) -> GaussianMoments:
        given: dict[str, Any] = {**defaults, **dict(zip(defaults, options, strict=False)), **named}
        product: Any = partial(function, **given)
        if input.dim() == dims + 2 and given["padding"] != "same":
            product = _Convolution(product, transposed, given)
        if isinstance(input, GaussianMoments) or isinstance(weight, GaussianMoments):
            alpha = None if transposed else _alpha_of_inputs(weight, given["groups"])
            return bilinear_moments(product, input, weight, alpha, bias)
        return GaussianMoments(product(input, weight, loc_of(bias)), bias.variance.reshape(-1, *[1] * dims))

    return convolution


class _Convolution(Layer):
    """A convolution of a batch, or its transpose."""

    def __init__(self, function: Callable[..., Tensor], transposed: bool, given: dict[str, Any]) -> None:
        super().__init__(function)
        padding = 0 if given["padding"] == "valid" else given["padding"]
        sizes = given["stride"], padding, given["dilation"], given.get("output_padding", 0)
        *first, last = ([size] if isinstance(size, int) else size for size in sizes)
        self.options = (*first, transposed, last, given["groups"])

    def gradients(self, g: Tensor, x: Tensor, weight: Tensor, wanted: tuple) -> Gradients:
        sizes = [g.shape[1]] if wanted[2] else None
        found = torch.ops.aten.convolution_backward(g, x, weight, sizes, *self.options, list(wanted))
        return tuple(found)


for _dims in (1, 2, 3):
    for _name in ("conv", "conv_transpose"):
        _function = getattr(F, f"{_name}{_dims}d")
        moment_rule(_function)(_convolution(_function, _dims))


def _alpha_of_inputs(weight: Any, groups: int) -> Tensor | None:
    """Noise that belongs to input channels, as ``[in, 1, ...]``; None for any other noise.

    The weight ``[out, in / groups, ...]`` of the k-th group sees the k-th part of the channels. A row of noise
    ``[1, in / groups, 1, ...]`` is the same for all groups. With one output channel per group, ``[out, in / groups,
    1, ...]`` has a row for each.
    """
    if not isinstance(weight, MultiplicativeMoments):
        return None
    alpha, dims = weight.alpha, weight.dim()
    alpha = alpha.reshape(*[1] * (dims - alpha.dim()), *alpha.shape)
    if any(size != 1 for size in alpha.shape[2:]):
        return None
    ones = [1] * (dims - 2)
    rows, columns = alpha.shape[:2]
    if rows == 1:
        alpha = alpha.reshape(columns, *ones)
        return alpha if groups == 1 or columns == 1 else alpha.repeat(groups, *ones)
    if rows == groups == weight.shape[0]:
        return alpha.expand(-1, weight.shape[1], *ones).reshape(-1, *ones)
    return None


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


@moment_rule(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)
def dropout(input: GaussianMoments, p: float = 0.5, training: bool = True) -> GaussianMoments:
    """Moments of dropout of elements or channels.

    Example:
        >>> F.dropout(GaussianMoments(torch.ones(1), torch.zeros(1)), 0.5)
        GaussianMoments(loc=tensor([1.]), variance=tensor([1.]))
    """
    if not 0 <= p <= 1:
        raise ArgumentError(f"the dropout probability has to be between 0 and 1, got {p}")
    if not training or p == 0:
        return input
    if p == 1:
        return GaussianMoments(torch.zeros_like(input.loc), torch.zeros_like(input.loc))
    odds = p / (1 - p)
    return GaussianMoments(input.loc, input.variance / (1 - p) + odds * input.loc.square())


@moment_rule(F.alpha_dropout, F.feature_alpha_dropout)
def alpha_dropout(input: GaussianMoments, p: float = 0.5, training: bool = False) -> GaussianMoments:
    r"""Moments of :math:`a(b (x - s) + (1 - p)s)` with :math:`a^2 (1 - p)(1 + ps^2) = 1`, where s is the limit of SELU.

    .. math:: \mathrm E = a(1 - p)m, \qquad \mathrm{Var} = a^2 (1 - p)(v + p(m - s)^2)
    """
    limit = -1.7580993408473766
    shifted = GaussianMoments(input.loc - limit, input.variance)
    noisy = dropout(shifted, p, training)
    if noisy is shifted:
        return input
    scale = math.sqrt((1 - p) / (1 + p * limit**2))
    return GaussianMoments(scale * input.loc, scale**2 * noisy.variance)
