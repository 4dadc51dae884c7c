# SPDX-License-Identifier: Apache-2.0
"""Recurrent modules: those of torch in the certain limit, samples of weights elsewhere."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.bilinear import MultiplicativeMoments
from pyro_dvi.moments.sequences import _between

DOUBLE = {"dtype": torch.float64}


class Case(NamedTuple):
    func: Callable


CASES = [
    Case(f)
    for f in (
        torch.lstm_cell,
        torch.gru_cell,
        torch.rnn_tanh_cell,
        torch.rnn_relu_cell,
        torch.lstm,
        torch.gru,
        torch.rnn_tanh,
        torch.rnn_relu,
    )
]


def uncertain(module: nn.Module, alpha: float, names: str = "") -> Any:
    for name, parameter in list(module.named_parameters()):
        if names in name:
            del module._parameters[name]
            w = parameter.detach()
            noise = torch.full((1,) * w.dim(), alpha, dtype=w.dtype)
            object.__setattr__(module, name, MultiplicativeMoments(w, noise))
    return module


def flat(result: Any) -> list:
    return [x for part in result for x in flat(part)] if isinstance(result, tuple) else [result]


MODULES: dict[str, Callable[[], nn.Module]] = {
    "LSTMCell": lambda: nn.LSTMCell(3, 4, **DOUBLE),
    "GRUCell": lambda: nn.GRUCell(3, 4, **DOUBLE),
    "RNNCell": lambda: nn.RNNCell(3, 4, **DOUBLE),
    "RNNCell relu": lambda: nn.RNNCell(3, 4, nonlinearity="relu", bias=False, **DOUBLE),
    "LSTM": lambda: nn.LSTM(3, 4, **DOUBLE),
    "LSTM deep": lambda: nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True, **DOUBLE),
    "LSTM projected": lambda: nn.LSTM(3, 4, 2, proj_size=2, bias=False, **DOUBLE),
    "GRU": lambda: nn.GRU(3, 4, bias=False, **DOUBLE),
    "GRU deep": lambda: nn.GRU(3, 4, 2, bidirectional=True, batch_first=True, **DOUBLE),
    "RNN": lambda: nn.RNN(3, 4, 2, **DOUBLE),
    "RNN relu": lambda: nn.RNN(3, 4, nonlinearity="relu", bidirectional=True, **DOUBLE),
}


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODULES[name]()


def inputs(name: str, batched: bool = True) -> Tensor:
    shape = (5, 3) if "Cell" in name else (6, 5, 3)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), **DOUBLE)
    return x if batched else x[0] if "Cell" in name else x[:, 0]


@pytest.mark.every(3)
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("names", ["", "weight_hh", "bias", "input"])
@pytest.mark.parametrize("name", MODULES)
def test_certain_limit(name: str, names: str, batched: bool) -> None:
    x: Any = inputs(name, batched)
    expected = flat(built(name)(x))
    module = built(name)
    if names == "input":
        x = GaussianMoments(x, torch.zeros_like(x))
    elif names == "bias" and not module.bias:
        pytest.skip("has no bias")
    else:
        uncertain(module, 0.0, names)
    for result, value in zip(flat(module(x)), expected, strict=True):
        assert isinstance(result, GaussianMoments)
        # Activations see at least the floor: the square of a rounding error.
        torch.testing.assert_close(result.loc, value, rtol=1e-10, atol=1e-10)
        assert result.variance.max() < 1e-20


@pytest.mark.every(3)
@pytest.mark.parametrize("name", [n for n in MODULES if "deep" not in n and "projected" not in n])
def test_deviation_against_samples_of_the_weights(name: str) -> None:
    """One cell is nearly exact; sequences keep most of the deviation, though steps share their weights."""
    plain, x = built(name), inputs(name)
    state = {k: v.detach() for k, v in plain.named_parameters()}
    generator = torch.Generator().manual_seed(2)
    alpha, samples = 0.01, 1500
    with torch.no_grad():
        drawn = []
        for _ in range(samples):
            noise = {
                k: 1 + alpha**0.5 * torch.randn(v.shape, generator=generator, **DOUBLE)
                for k, v in state.items()
            }
            drawn.append(
                flat(torch.func.functional_call(plain, {k: v * noise[k] for k, v in state.items()}, (x,)))[0]
            )
        values = torch.stack(drawn)
        y = flat(uncertain(built(name), alpha)(x))[0]
    ratio = y.variance.sqrt() / values.std(0)
    alive = values.std(0) > 1e-6  # a rectifier may be off in every sample, where 0/0 says nothing
    error = ((y.loc - values.mean(0)) / values.std(0))[alive].abs().median()
    low, high = (0.93, 1.05) if "Cell" in name else (0.7, 1.05)
    assert low < ratio[alive].median() < high
    assert error < 0.1


def test_mixture_of_old_and_new_state_is_exact() -> None:
    nodes, weights = (torch.from_numpy(a) for a in np.polynomial.hermite_e.hermegauss(6))
    p = weights / weights.sum()
    n, h, z = (
        GaussianMoments(torch.tensor(m, **DOUBLE), torch.tensor(v, **DOUBLE))
        for m, v in ((1, 0.3), (-2, 0.5), (0.4, 0.02))
    )
    for drawn in ((n, h, z), (n.loc, h, z), (n, h.loc, z), (n, h, z.loc), (n.loc, h.loc, z)):
        a, b, c = (
            (x.loc + x.variance.sqrt() * nodes if isinstance(x, GaussianMoments) else x.expand(6)).reshape(
                [-1 if i == k else 1 for i in range(3)]
            )
            for k, x in enumerate(drawn)
        )
        weight = p[:, None, None] * p[:, None] * p
        value = (1 - c) * a + c * b
        mean = (weight * value).sum()
        result = _between(*drawn)
        torch.testing.assert_close(result.loc, mean)
        torch.testing.assert_close(result.variance, (weight * (value - mean).square()).sum())


def test_a_given_state_may_be_uncertain() -> None:
    cell, x = built("GRUCell"), inputs("GRUCell")
    h = GaussianMoments(torch.randn(5, 4, **DOUBLE), torch.rand(5, 4, **DOUBLE))
    y = cell(x, h)
    torch.testing.assert_close(cell(x, GaussianMoments(h.loc, 0 * h.variance)).loc, cell(x, h.loc))
    assert (y.variance > 0).all()
    lstm, x = built("LSTM"), inputs("LSTM")
    state = GaussianMoments(torch.zeros(1, 5, 4, **DOUBLE), torch.ones(1, 5, 4, **DOUBLE))
    output, _ = lstm(x, (state, state))
    assert (output.variance[0] > output.variance[-1]).float().mean() > 0.9  # the start is forgotten


def test_dropout_between_layers_in_training() -> None:
    torch.manual_seed(0)
    net = uncertain(nn.GRU(3, 4, 2, dropout=0.5, **DOUBLE), 1e-6)
    assert net.train()(inputs("GRU"))[0].variance.mean() > 10 * net.eval()(inputs("GRU"))[0].variance.mean()


def test_gradients_reach_weights_through_time() -> None:
    net = nn.LSTM(3, 4, **DOUBLE)
    leaves = {}
    for name, parameter in list(net.named_parameters()):
        del net._parameters[name]
        leaves[name] = (
            parameter.detach().requires_grad_(),
            torch.full_like(parameter, 0.01).requires_grad_(),
        )
        object.__setattr__(net, name, GaussianMoments(*leaves[name]))
    net(inputs("LSTM"))[0].variance[-1].sum().backward()
    for loc, variance in leaves.values():
        assert loc.grad.abs().sum() > 0 and variance.grad.abs().sum() > 0


@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN"])
def test_packed_sequences_are_refused(name: str) -> None:
    packed = pack_sequence([torch.randn(4, 3, **DOUBLE), torch.randn(2, 3, **DOUBLE)])
    with pytest.raises(UnsupportedError, match="pad them"):
        uncertain(built(name), 0.1)(packed)
