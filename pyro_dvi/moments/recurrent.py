# SPDX-License-Identifier: Apache-2.0
"""Recurrent cells and sequences, step by step from the rules of their parts.

Status: each step is as exact as its parts, for independent gates and state. Weights that act again at the next step are
the same, so states of different steps are correlated; that is dropped, and deviations of long sequences come out too
small where the state accumulates.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments.rules import moment_rule
from pyro_dvi.moments.value import GaussianMoments, loc_of, variance_of

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


# --- sequences -----------------------------------------------------------------------------------------------


class _Options(NamedTuple):
    """What torch's recurrent functions take after weights and biases."""

    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool


def _sequence(step: Callable[..., State], input: Any, state: State, params: Any, options: _Options) -> State:
    """Run all layers and directions; return outputs ``[L, B, H]`` (or batch first) and the last states."""
    directions = 2 if options.bidirectional else 1
    number = len(params) // (options.num_layers * directions)
    x = input.transpose(0, 1) if options.batch_first else input
    last = []
    for layer in range(options.num_layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            w_ih, w_hh, *rest = params[index * number : (index + 1) * number]
            b_ih, b_hh = (rest.pop(0), rest.pop(0)) if options.has_biases else (None, None)
            steps = F.linear(x, w_ih, b_ih).unbind(0)
            now = tuple(s[index] for s in state)
            hidden = []
            for t in reversed(range(len(steps))) if direction else range(len(steps)):
                now = step(steps[t], now, w_hh, b_hh, *rest)
                hidden.append(now[0])
            outputs.append(torch.stack(hidden[::-1] if direction else hidden))
            last.append(now)
        x = torch.cat(outputs, -1) if options.bidirectional else outputs[0]
        if layer < options.num_layers - 1:
            x = F.dropout(x, options.dropout, options.train)
    output = x.transpose(0, 1) if options.batch_first else x
    return (output, *(torch.stack(parts) for parts in zip(*last, strict=True)))


# --- the functions of torch ----------------------------------------------------------------------------------


def _cell(step: Callable[..., State]) -> Callable[..., Any]:
    def cell(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
        """Moments of the next state: hidden and cell state of an LSTM."""
        is_pair = isinstance(hx, tuple | list)
        state = step(F.linear(input, w_ih, b_ih), tuple(hx) if is_pair else (hx,), w_hh, b_hh)
        return state if is_pair else state[0]

    return cell


def _network(name: str, step: Callable[..., State]) -> Callable[..., State]:
    def network(input: Any, hx: Any, params: Any, *options: Any) -> State:
        if isinstance(hx, Tensor) and not hx.is_floating_point():  # the batch sizes of a packed sequence
            raise UnsupportedError(
                f"torch.{name} of moments has no rule for packed sequences: pass padded ones (pad_packed_sequence) and "
                "mask what is padded in the likelihood"
            )
        state = tuple(hx) if isinstance(hx, tuple | list) else (hx,)
        return _sequence(step, input, state, params, _Options(*options))

    network.__doc__ = f"""Moments of the outputs and last states of ``torch.{name}``.

    Raises:
        UnsupportedError: a packed sequence.
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
