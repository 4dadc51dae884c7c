# SPDX-License-Identifier: Apache-2.0
"""Recurrent cells and sequences, step by step from the rules of their parts.

Status: each step is as exact as its parts, for independent gates and state. Weights that act again at the next step are
the same, so states of different steps are correlated; that is dropped, and deviations of long sequences come out too
small where the state accumulates.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments.rules import moment_rule
from pyro_dvi.moments.value import GaussianMoments, loc_of, variance_of

__all__ = ["gru", "gru_cell", "lstm", "lstm_cell", "rnn", "rnn_relu_cell", "rnn_tanh_cell"]

State = tuple[Any, ...]  # hidden state first, then the cell of an LSTM


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


# --- cells ---------------------------------------------------------------------------------------------------


@moment_rule(torch.lstm_cell)
def lstm_cell(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> State:
    """Moments of the next hidden and cell state."""
    return _lstm_step(F.linear(input, w_ih, b_ih), tuple(hx), w_hh, b_hh)


@moment_rule(torch.gru_cell)
def gru_cell(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    """Moments of the next state."""
    return _gru_step(F.linear(input, w_ih, b_ih), (hx,), w_hh, b_hh)[0]


@moment_rule(torch.rnn_tanh_cell)
def rnn_tanh_cell(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    """Moments of the next state."""
    return _rnn_step(torch.tanh, F.linear(input, w_ih, b_ih), (hx,), w_hh, b_hh)[0]


@moment_rule(torch.rnn_relu_cell)
def rnn_relu_cell(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    """Moments of the next state."""
    return _rnn_step(torch.relu, F.linear(input, w_ih, b_ih), (hx,), w_hh, b_hh)[0]


# --- sequences -----------------------------------------------------------------------------------------------


def _sequence(
    step: Callable[..., State],
    input: Any,
    state: State,
    params: Any,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> State:
    """Run all layers and directions; return outputs ``[L, B, H]`` (or batch first) and the last states."""
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


def _refuse_packed(name: str, params: Any) -> None:
    if not isinstance(params, list | tuple) or not all(
        torch.is_tensor(p) or isinstance(p, GaussianMoments) for p in params
    ):
        raise UnsupportedError(
            f"{name} of moments has no rule for packed sequences: pass padded ones (pad_packed_sequence) and mask "
            "what is padded in the likelihood"
        )


@moment_rule(torch.lstm)
def lstm(input: Any, hx: Any, params: Any, *options: Any) -> State:
    """Moments of the outputs, last hidden and last cell states of :class:`torch.nn.LSTM`.

    Raises:
        UnsupportedError: a packed sequence.
    """
    _refuse_packed("nn.LSTM", params if not torch.is_tensor(hx) else None)
    return _sequence(_lstm_step, input, tuple(hx), params, *options)


@moment_rule(torch.gru)
def gru(input: Any, hx: Any, params: Any, *options: Any) -> State:
    """Moments of the outputs and last states of :class:`torch.nn.GRU`.

    Raises:
        UnsupportedError: a packed sequence.
    """
    _refuse_packed("nn.GRU", params)
    return _sequence(_gru_step, input, (hx,), params, *options)


def _rnn_rule(activation: Callable) -> Callable[..., State]:
    def rnn(input: Any, hx: Any, params: Any, *options: Any) -> State:
        _refuse_packed("nn.RNN", params)
        return _sequence(partial(_rnn_step, activation), input, (hx,), params, *options)

    rnn.__doc__ = f"Moments of the outputs and last states of torch.nn.RNN with {activation.__name__}."
    return rnn


rnn = moment_rule(torch.rnn_tanh)(_rnn_rule(torch.tanh))
moment_rule(torch.rnn_relu)(_rnn_rule(torch.relu))
