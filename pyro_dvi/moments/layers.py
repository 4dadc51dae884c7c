# SPDX-License-Identifier: Apache-2.0
r"""Convolutions, embeddings and dropout.

**Convolutions** and their transposes are bilinear (:mod:`pyro_dvi.moments.bilinear`). Their moments are exact for
independent inputs and weights, for every stride, padding, dilation and number of groups. Outputs at different positions
share weights and are correlated; the next layer treats them as independent.

**Dropout** in training multiplies by noise with known moments. With the mask :math:`b \sim \mathrm{Bernoulli}(1 - p)`,
independent of x,

.. math:: \mathrm E\Bigl[\frac{b x}{1 - p}\Bigr] = m, \qquad \mathrm{Var} = \frac{v + p m^2}{1 - p}.

No mask is drawn, and the marginals over mask and x are exact. Elements of a channel that is dropped as a whole are
treated as independent.

Source: Schmitt & Roth (2021), Eq. 9.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments.bilinear import MultiplicativeMoments, bilinear_moments
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
        if isinstance(input, GaussianMoments) or isinstance(weight, GaussianMoments):
            alpha = None if transposed else _alpha_of_inputs(weight, given["groups"])
            return bilinear_moments(product, input, weight, alpha, bias)
        return GaussianMoments(product(input, weight, loc_of(bias)), bias.variance.reshape(-1, *[1] * dims))

    return convolution


for _dims in (1, 2, 3):
    for _name in ("conv", "conv_transpose"):
        _function = getattr(F, f"{_name}{_dims}d")
        moment_rule(_function)(_convolution(_function, _dims))


def _alpha_of_inputs(weight: Any, groups: int) -> Tensor | None:
    """Return relative variances as ``[in, 1, ...]``; None if they differ between weights of the same input channel.

    The weight ``[out, in / groups, ...]`` of the k-th group acts on the k-th part of the channels. Relative variances
    ``[1, in / groups, 1, ...]`` are the same for all groups. With one output channel per group, relative variances
    ``[out, in / groups, 1, ...]`` have one row for each group.
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
    """Moments of rows of a table. Status: exact marginals; repeated rows are treated as independent.

    Raises:
        UnsupportedError: for ``max_norm``, which changes the table in place.
    """
    if max_norm is not None:
        raise UnsupportedError(
            "F.embedding(max_norm=...) changes its table in place: normalise the table in the model instead"
        )
    options: dict[str, Any] = {"scale_grad_by_freq": scale_grad_by_freq, "sparse": sparse}
    return GaussianMoments(
        F.embedding(input, weight.loc, padding_idx, **options),
        F.embedding(input, weight.variance, padding_idx, **options),
    )


@moment_rule(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)
def dropout(input: GaussianMoments, p: float = 0.5, training: bool = True) -> GaussianMoments:
    """Moments of dropout of elements or channels.

    Example:
        >>> F.dropout(GaussianMoments(torch.ones(1), torch.zeros(1)), 0.5)
        GaussianMoments(loc=tensor([1.]), variance=tensor([1.]))
    """
    if not training or p == 0:
        return input
    if p == 1:
        return GaussianMoments(torch.zeros_like(input.loc), torch.zeros_like(input.loc))
    odds = p / (1 - p)
    return GaussianMoments(input.loc, input.variance / (1 - p) + odds * input.loc.square())
