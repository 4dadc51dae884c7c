# SPDX-License-Identifier: Apache-2.0
r"""Attention: averages of values, weighted by a softmax of scores.

With scores of mean m and variance s, :math:`q` the mean of their softmax (:mod:`pyro_dvi.moments.softmax`) and
:math:`\bar v = \sum_j q_j v_j`,

.. math::
    \mathrm E = \bar v, \qquad
    \mathrm{Var} = \sum_j q_j^2 \mathrm{Var}[v_j]
        + \sum_j a_j \bigl((v_j - \bar v)^2 + \mathrm{Var}[v_j]\bigr), \qquad
    a_j = \frac{q_j^2 s_j}{1 + q_j s_j}.

The second sum is the first order in the scores, which knows that weights sum to one; its damping keeps the variance
below :math:`\sum_j q_j (v_j - \bar v)^2`, the most that any random weights of mean q can give.

Status: approximate. Scores of one query are taken as independent. Two identities remove most of what they share: what
is added to all keys alike cancels in the softmax, so keys are centred; and with uncertain weights, inputs are averaged
*before* they are projected to values, since all values share those weights.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments.bilinear import MultiplicativeMoments
from pyro_dvi.moments.rules import moment_rule
from pyro_dvi.moments.softmax import probabilities
from pyro_dvi.moments.value import GaussianMoments, loc_of, second_moment_of, variance_of


@moment_rule(F.scaled_dot_product_attention)
def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> GaussianMoments:
    """Moments of attention.

    Status: approximate, see the module.

    Args:
        query: ``[*, L, d]``.
        key: ``[*, S, d]``.
        value: ``[*, S, e]``.
        attn_mask: True where a query attends, or what is added to the scores, which may be uncertain.
        dropout_p: probability of leaving out a weight, whose moments are added; nothing is drawn.
        is_causal: whether a query attends to no later key.
        scale: of the scores, by default the inverse root of d.
        enable_gqa: whether several heads of queries share one of keys.
    """
    if enable_gqa:
        key, value = (torch.repeat_interleave(t, query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    scores = _scores(query, _centred(key), scale)
    q, a = _weights(_masked(scores, attn_mask, is_causal))
    return _with_dropout(_averaged(q, a, value), q, a, value, dropout_p)


def _centred(key: Any) -> Any:
    return key - loc_of(key).mean(-2, keepdim=True)


def _scores(query: Any, key: Any, scale: float | None) -> Any:
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return torch.matmul(scale * query, key.transpose(-2, -1))


def _masked(scores: Any, mask: Any, is_causal: bool) -> Any:
    if is_causal:
        rows, columns = scores.shape[-2:]
        mask = torch.ones(rows, columns, dtype=torch.bool, device=scores.device).tril()
    if mask is None:
        return scores
    if mask.dtype is torch.bool:
        mask = torch.zeros(mask.shape, dtype=scores.dtype, device=mask.device).masked_fill(~mask, -math.inf)
    return scores + mask


def _weights(scores: Any) -> tuple[Tensor, Tensor | None]:
    """Mean of the attention weights, and what multiplies squared differences of values; None if certain."""
    if not isinstance(scores, GaussianMoments):
        return torch.softmax(scores, -1), None
    s = scores.variance
    q, _ = probabilities(scores.loc, s, -1)
    return q, q.square() * s / (1 + q * s)


def _averaged(q: Tensor, a: Tensor | None, values: Any) -> Any:
    """Average values over keys."""
    if a is None:
        return torch.matmul(q, values)
    v, spread = loc_of(values), variance_of(values)
    shift = v.mean(-2, keepdim=True)  # which all values share: it is certain, as the weights sum to one
    c = v - shift
    centre = torch.matmul(q, c)
    cross = a.sum(-1, keepdim=True) * centre - 2 * torch.matmul(a, c)
    variance = (torch.matmul(a, c.square()) + centre * cross).clamp_min(0)
    if spread is not None:
        variance = variance + torch.matmul(q.square() + a, spread)
    return GaussianMoments(centre + shift, variance)


def _with_dropout(result: Any, q: Tensor, a: Tensor | None, values: Any, p: float) -> Any:
    """Add what dropout of attention weights brings: p / (1 - p) times the second moment of each product."""
    if p == 0:
        return result
    square = q.square() if a is None else q.square() + a
    spread = p / (1 - p) * torch.matmul(square, second_moment_of(values))
    known = variance_of(result)
    return GaussianMoments(loc_of(result), spread if known is None else known + spread)


@moment_rule(F.multi_head_attention_forward)
def multi_head_attention(
    query: Any,
    key: Any,
    value: Any,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Any,
    in_proj_bias: Any,
    bias_k: Any,
    bias_v: Any,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Any,
    out_proj_bias: Any,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Any = None,
    k_proj_weight: Any = None,
    v_proj_weight: Any = None,
    static_k: Any = None,
    static_v: Any = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Any, Any]:
    """Moments of multi-head attention, as :class:`torch.nn.MultiheadAttention` calls it.

    Status: approximate, see the module.

    Raises:
        UnsupportedError: ``add_bias_kv``, ``add_zero_attn`` or static keys.
    """
    if add_zero_attn or any(t is not None for t in (bias_k, bias_v, static_k, static_v)):
        raise UnsupportedError(
            "attention of moments has no rule for add_bias_kv, add_zero_attn, static_k and static_v: build "
            "nn.MultiheadAttention without them"
        )
    batched = query.dim() == 3
    if not batched:
        query, key, value = (t.unsqueeze(1) for t in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    width = query.shape[-1]
    if use_separate_proj_weight:
        weights = (q_proj_weight, k_proj_weight, v_proj_weight)
    else:
        weights = tuple(_rows(in_proj_weight, k * width, (k + 1) * width) for k in range(3))
    biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    query, key, value = (t.transpose(0, 1) for t in (query, key, value))  # [B, L, E]

    # A key bias, and what all keys share, cancel in the softmax, also where the weights are uncertain.
    queries = _heads(F.linear(query, weights[0], biases[0]), num_heads)
    keys = _heads(F.linear(_centred(key), weights[1]), num_heads)
    if attn_mask is not None and attn_mask.dim() == 3:
        attn_mask = attn_mask.reshape(-1, num_heads, *attn_mask.shape[1:])
    scores = _scores(queries, keys, None)
    scores = _masked(scores, _attended(attn_mask), is_causal and attn_mask is None)
    if key_padding_mask is not None:
        scores = _masked(scores, _attended(key_padding_mask[:, None, None]), False)

    q, a = _weights(scores)
    dropout_p = dropout_p if training else 0.0
    shared = isinstance(weights[2], GaussianMoments)
    values = None
    if dropout_p > 0 or not shared:
        values = _heads(F.linear(value, weights[2], biases[2]), num_heads)
    if shared:
        result = _projected(_averaged(q, a, value.unsqueeze(1)), weights[2], biases[2], num_heads)
    else:
        result = _averaged(q, a, values)
    result = _with_dropout(result, q, a, values, dropout_p)
    result = result.permute(2, 0, 1, 3).flatten(-2)  # [L, B, E]
    result = F.linear(result, out_proj_weight, out_proj_bias)

    attention = None
    if need_weights:
        attention = torch.softmax(scores, -1)
        attention = attention.mean(1) if average_attn_weights else attention
    if not batched:
        result, attention = result.squeeze(1), None if attention is None else attention.squeeze(0)
    return result, attention


def _attended(mask: Any) -> Any:
    """The mask with True where a query attends: in multi-head attention, True means to leave out."""
    return ~mask if mask is not None and mask.dtype is torch.bool else mask


def _heads(x: Any, number: int) -> Any:
    return x.unflatten(-1, (number, -1)).transpose(1, 2)  # [B, H, L, d]


def _rows(weight: Any, start: int, stop: int) -> Any:
    """Rows of a packed weight; multiplicative noise stays so."""
    if not isinstance(weight, MultiplicativeMoments):
        return weight[start:stop]
    alpha = weight.alpha
    own = alpha.dim() > 1 and alpha.shape[-2] != 1
    return MultiplicativeMoments(weight.loc[start:stop], alpha[start:stop] if own else alpha)


def _projected(x: Any, weight: GaussianMoments, bias: Any, number: int) -> Any:
    """Project averaged inputs ``[B, H, L, E]`` by the rows of each head."""
    if isinstance(weight, MultiplicativeMoments) and weight.alpha.dim() > 1 and weight.alpha.shape[-2] == 1:
        heads: Any = MultiplicativeMoments(weight.loc.unflatten(0, (number, -1)).mT, weight.alpha.mT)
    else:
        heads = weight.unflatten(0, (number, -1)).mT
    y = torch.matmul(x, heads)
    return y if bias is None else y + bias.unflatten(0, (number, 1, -1))
