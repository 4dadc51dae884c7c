# SPDX-License-Identifier: Apache-2.0
r"""Recurrent networks and attention.

**Recurrent cells** combine the rules of their parts step by step. For independent gates and state, each step is as
accurate as its parts. The same weights act at every step, so states of different steps are correlated. These
correlations are dropped; if the state accumulates, standard deviations are therefore too small for long sequences.

**Attention** averages values with weights from a softmax of scores. For scores of mean m and variance s, let :math:`q`
be the mean of their softmax (:mod:`pyro_dvi.moments.softmax`) and :math:`\bar v = \sum_j q_j v_j`. Then

.. math::
    \mathrm E = \bar v, \qquad
    \mathrm{Var} = \sum_j q_j^2 \mathrm{Var}[v_j]
        + \sum_j a_j \bigl((v_j - \bar v)^2 + \mathrm{Var}[v_j]\bigr), \qquad
    a_j = \frac{q_j^2 s_j}{1 + q_j s_j}.

The second sum is of first order in the variances s of the scores, and accounts for the constraint that the weights sum
to one. The denominator of :math:`a_j` keeps the variance below :math:`\sum_j q_j (v_j - \bar v)^2`, the largest
variance that random weights with mean q can give.

Attention is approximate: scores of one query are treated as independent. Two identities remove most of their
correlation. First, a shift of all keys cancels in the softmax, so keys are centred. Second, all values share the
weights of the projection; if these weights are uncertain, inputs are averaged *before* they are projected to values.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments.rules import moment_rule
from pyro_dvi.moments.softmax import probabilities
from pyro_dvi.moments.value import GaussianMoments, loc_of, second_moment_of, variance_of

State = tuple[Any, ...]  # hidden state first, then the cell state of an LSTM


def _lstm_step(x: Any, state: State, w_hh: Any, b_hh: Any, w_hr: Any = None) -> State:
    h, c = state
    i, f, g, o = (x + F.linear(h, w_hh, b_hh)).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return (h if w_hr is None else F.linear(h, w_hr)), c


def _gru_step(x: Any, state: State, w_hh: Any, b_hh: Any) -> State:
    (h,) = state
    r, z, n = x.chunk(3, -1)
    r_h, z_h, n_h = F.linear(h, w_hh, b_hh).chunk(3, -1)
    n = torch.tanh(n + torch.sigmoid(r + r_h) * n_h)
    return (_between(n, h, torch.sigmoid(z + z_h)),)


def _between(n: Any, h: Any, z: Any) -> Any:
    r"""Moments of :math:`(1 - z) n + z h`, exact for independent n, h and z.

    .. math::
        \mathrm{Var} = \mathrm E[(1-z)^2] \mathrm{Var}[n] + \mathrm E[z^2] \mathrm{Var}[h]
            + \mathrm{Var}[z] (m_n - m_h)^2
    """
    weight, difference = loc_of(z), loc_of(h) - loc_of(n)
    loc = loc_of(n) + weight * difference
    spread = variance_of(z)
    wobble = 0 if spread is None else spread
    parts = [] if spread is None else [spread * difference.square()]
    if isinstance(n, GaussianMoments):
        parts.append(((1 - weight).square() + wobble) * n.variance)
    if isinstance(h, GaussianMoments):
        parts.append((weight.square() + wobble) * h.variance)
    return GaussianMoments(loc, sum(parts[1:], parts[0])) if parts else loc


def _rnn_step(activation: Callable, x: Any, state: State, w_hh: Any, b_hh: Any) -> State:
    return (activation(x + F.linear(state[0], w_hh, b_hh)),)


# --- sequences -----------------------------------------------------------------------------------------------


def _sequence(step: Callable[..., State], input: Any, state: State, params: Any, options: tuple) -> State:
    """Run all layers and directions; return outputs ``[L, B, H]`` (or batch first) and the last states."""
    has_biases, num_layers, dropout, train, bidirectional, batch_first = options
    directions = 2 if bidirectional else 1
    number = len(params) // (num_layers * directions)
    x = input.transpose(0, 1) if batch_first else input
    last = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            w_ih, w_hh, *rest = params[index * number : (index + 1) * number]
            b_ih, b_hh = (rest.pop(0), rest.pop(0)) if has_biases else (None, None)
            steps = F.linear(x, w_ih, b_ih).unbind(0)
            now = tuple(s[index] for s in state)
            hidden = []
            for t in reversed(range(len(steps))) if direction else range(len(steps)):
                now = step(steps[t], now, w_hh, b_hh, *rest)
                hidden.append(now[0])
            outputs.append(torch.stack(hidden[::-1] if direction else hidden))
            last.append(now)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if layer < num_layers - 1:
            x = F.dropout(x, dropout, train)
    output = x.transpose(0, 1) if batch_first else x
    return (output, *(torch.stack(parts) for parts in zip(*last, strict=True)))


# --- the functions of torch ----------------------------------------------------------------------------------


def _cell(step: Callable[..., State]) -> Callable[..., Any]:
    def cell(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
        """Moments of the next state; for an LSTM, of the hidden state and the cell state."""
        is_pair = isinstance(hx, tuple | list)
        state = step(F.linear(input, w_ih, b_ih), tuple(hx) if is_pair else (hx,), w_hh, b_hh)
        return state if is_pair else state[0]

    return cell


def _network(name: str, step: Callable[..., State]) -> Callable[..., State]:
    def network(input: Any, hx: Any, params: Any, *options: Any) -> State:
        if isinstance(hx, Tensor) and not hx.is_floating_point():  # the batch sizes of a packed sequence
            raise UnsupportedError(
                f"torch.{name} of moments has no rule for packed sequences: pad them, and mask the padding"
            )
        state = tuple(hx) if isinstance(hx, tuple | list) else (hx,)
        return _sequence(step, input, state, params, options)

    network.__doc__ = f"""Moments of the outputs and last states of ``torch.{name}``.

    Raises:
        UnsupportedError: for a packed sequence.
    """
    return network


_STEPS: dict[str, Callable[..., State]] = {
    "lstm": _lstm_step,
    "gru": _gru_step,
    "rnn_tanh": partial(_rnn_step, torch.tanh),
    "rnn_relu": partial(_rnn_step, torch.relu),
}
for _name, _step in _STEPS.items():
    moment_rule(getattr(torch, f"{_name}_cell"))(_cell(_step))
    moment_rule(getattr(torch, _name))(_network(_name, _step))


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

    Status: approximate; see the docstring of the module.

    Args:
        query: ``[*, L, d]``.
        key: ``[*, S, d]``.
        value: ``[*, S, e]``.
        attn_mask: a boolean tensor that is True where a query attends, or a tensor or moments to add to the scores.
        dropout_p: probability of dropping an attention weight; the moments of dropout are included, and no mask is
            drawn.
        is_causal: True if queries do not attend to later keys.
        scale: factor of the scores; by default the inverse square root of d.
        enable_gqa: True if several heads of queries share one head of keys.
    """
    if enable_gqa:
        key, value = (torch.repeat_interleave(t, query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    kept = None if attn_mask is None else _can_attend(attn_mask).any(-2)
    scores = _scores(query, _centred(key, kept), scale)
    q, a = _weights(_masked(scores, attn_mask, is_causal))
    return _with_dropout(_averaged(q, a, value), q, a, value, dropout_p)


def _centred(key: Any, kept: Tensor | None = None) -> Any:
    """Subtract the mean over keys, without those that no query attends to, such as padding."""
    loc = loc_of(key)
    if kept is None:
        return key - loc.mean(-2, keepdim=True)
    share = kept.unsqueeze(-1).to(loc.dtype).expand(*kept.shape[:-1], loc.shape[-2], 1)
    return key - (share * loc).sum(-2, keepdim=True) / share.sum(-2, keepdim=True).clamp_min(1)


def _can_attend(mask: Any) -> Tensor:
    return mask if mask.dtype is torch.bool else loc_of(mask) > -math.inf


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
    """Return the mean q of the attention weights, and the factors a (None for deterministic scores)."""
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
    shift = v.mean(-2, keepdim=True)  # shared by all values, and deterministic because the weights sum to one
    c = v - shift
    centre = torch.matmul(q, c)
    cross = a.sum(-1, keepdim=True) * centre - 2 * torch.matmul(a, c)
    variance = (torch.matmul(a, c.square()) + centre * cross).clamp_min(0)
    if spread is not None:
        variance = variance + torch.matmul(q.square() + a, spread)
    return GaussianMoments(centre + shift, variance)


def _with_dropout(result: Any, q: Tensor, a: Tensor | None, values: Any, p: float) -> Any:
    """Add the variance from dropout of attention weights: p / (1 - p) times the second moment of each product."""
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

    Status: approximate; see the docstring of the module.

    Raises:
        UnsupportedError: for ``add_bias_kv``, ``add_zero_attn`` or static keys.
    """
    if add_zero_attn or any(t is not None for t in (bias_k, bias_v, static_k, static_v)):
        raise UnsupportedError(
            "attention of moments has no rule for add_bias_kv and add_zero_attn: build the layer without them"
        )
    batched = query.dim() == 3
    if not batched:
        query, key, value = (t.unsqueeze(1) for t in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    if use_separate_proj_weight:
        weights = (q_proj_weight, k_proj_weight, v_proj_weight)
    else:
        weights = in_proj_weight.chunk(3)
    biases = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    query, key, value = (t.transpose(0, 1) for t in (query, key, value))  # [B, L, E]

    # A key bias, or any shift of all keys, cancels in the softmax, even with uncertain weights.
    queries = _heads(F.linear(query, weights[0], biases[0]), num_heads)
    padding = _attended(key_padding_mask)
    centred = _centred(key, None if padding is None else _can_attend(padding))
    keys = _heads(F.linear(centred, weights[1]), num_heads)
    if attn_mask is not None and attn_mask.dim() == 3:
        attn_mask = attn_mask.reshape(-1, num_heads, *attn_mask.shape[1:])
    scores = _scores(queries, keys, None)
    scores = _masked(scores, _attended(attn_mask), is_causal and attn_mask is None)
    if padding is not None:
        scores = _masked(scores, padding[:, None, None], False)

    q, a = _weights(scores)
    dropout_p = dropout_p if training else 0.0
    shared = isinstance(weights[2], GaussianMoments)
    values = None
    if dropout_p > 0 or not shared:
        values = _heads(F.linear(value, weights[2], biases[2]), num_heads)
    if shared:
        heads = weights[2].unflatten(0, (num_heads, -1)).mT
        result = torch.matmul(_averaged(q, a, value.unsqueeze(1)), heads)
        if biases[2] is not None:
            result = result + biases[2].unflatten(0, (num_heads, 1, -1))
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
    """Return a mask that is True where a query attends; in masks of multi-head attention, True means masked out."""
    return ~mask if mask is not None and mask.dtype is torch.bool else mask


def _heads(x: Any, number: int) -> Any:
    return x.unflatten(-1, (number, -1)).transpose(1, 2)  # [B, H, L, d]
