# SPDX-License-Identifier: Apache-2.0
"""Every rule works where its arguments are, with the numbers of the CPU."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.bilinear import MultiplicativeMoments
from tests.moments import (
    battery,
    multilinear,
    test_activations,
    test_arithmetic,
    test_arithmetic_powers,
    test_bilinear_affine,
    test_elements,
    test_layers_convolution,
    test_layers_dropout,
    test_normalisation,
    test_reduction,
    test_reduction_pooling,
    test_softmax_maximum,
)

DTYPE = torch.float64
RTOL = {torch.float64: 1e-9, torch.float32: 1e-5}
FLOAT32_CONSTANTS = {F.hardsigmoid, F.hardswish}  # of CUDA: 1 / 6
MODULES = (
    test_activations,
    test_bilinear_affine,
    test_arithmetic,
    test_layers_convolution,
    test_layers_dropout,
    test_softmax_maximum,
    test_normalisation,
    test_reduction_pooling,
    test_arithmetic_powers,
    test_reduction,
    test_elements,
)
# Random, of the CPU by name, refused, or with tests of their own.
LEFT_OUT = {
    torch.empty_like,
    torch.rand_like,
    torch.randn_like,
    torch.reciprocal,
    torch.sqrt,
    torch.rsqrt,
    torch.Tensor.new_empty,
    torch.Tensor.cpu,
    torch.Tensor.cuda,
    torch.Tensor.copy_,
    torch.Tensor.fill_,
    torch.Tensor.__setitem__,
    torch.fill_,
}
# Take a sequence; newer versions of torch take moments for one, by their rows.
JOINING = {getattr(torch, f"{name}stack") for name in ("", "h", "v", "d", "column_", "row_")} | {
    torch.cat,
    torch.concat,
    torch.concatenate,
}


def cases(module: Any) -> list[Any]:
    return [
        case
        for case in module.CASES
        if case.func not in LEFT_OUT
        and case not in test_reduction_pooling.INDICES
        and not {"device", "training"} & case.kwargs.keys()
    ]


def moved(value: Any, device: torch.device | str) -> Any:
    """Bring tensors and moments in containers to a device, the same object to the same object."""
    known: dict[int, Any] = {}

    def move(leaf: Any) -> Any:
        if isinstance(leaf, GaussianMoments | Tensor):
            leaf = known.setdefault(id(leaf), leaf.to(device))
        return leaf

    return tree_map(move, value)


def arguments(case: Any) -> tuple[Any, ...]:
    if isinstance(case, multilinear.Case):
        return tuple(case.arguments())
    if isinstance(case, battery.Case):
        low, high = max(-1.5, case.domain[0] + 0.1), min(1.5, case.domain[1])
        loc = torch.linspace(low, high, math.prod(case.shape), dtype=DTYPE).reshape(case.shape)
        return (GaussianMoments(loc, 0.01 + 0.02 * loc.square()),)
    if case.func in JOINING:
        return ((case.x(), case.x()),)
    return (case.x(),) if hasattr(case, "x") else case.args


def check_same(found: Any, expected: Any, device: torch.device, rtol: float = 0.0) -> None:
    if isinstance(expected, tuple | list):
        for a, b in zip(found, expected, strict=True):
            check_same(a, b, device, rtol)
    elif isinstance(expected, GaussianMoments):
        assert found.loc.device == found.variance.device == device
        check_same((found.loc, found.variance), (expected.loc, expected.variance), device, rtol)
    elif isinstance(expected, Tensor):
        assert found.device == device
        rtol = max(rtol, RTOL.get(expected.dtype, 0.0))
        torch.testing.assert_close(found.cpu(), expected, rtol=rtol, atol=rtol / 1000)
    else:
        assert found == expected


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition("_")[2])
def test_rules(module, device):
    for case in cases(module):
        try:
            check_case(case, device)
        except Exception as error:
            error.add_note(f"case {case}")
            raise


def check_case(case, device):
    given = arguments(case)
    expected = case(*given)
    names = {f.name for f in dataclasses.fields(case)} & {"args", "first", "kwargs"}
    there = dataclasses.replace(case, **{name: moved(getattr(case, name), device) for name in names})
    rtol = 1e-7 if case.func in FLOAT32_CONSTANTS else 0.0
    check_same(there(*moved(given, device)), expected, device, rtol)


def gaussian(*shape: int) -> GaussianMoments:
    return test_arithmetic.gaussian(*shape)


FURTHER: dict[str, tuple[Callable, tuple[Any, ...]]] = {
    "power of a lognormal": (lambda h: h.exp() ** 0.3, (gaussian(3, 4),)),
    "reciprocal of a lognormal": (lambda h: 1 / h.exp(), (gaussian(3, 4),)),
    "quotient by a lognormal": (lambda h, c: c / h.exp(), (gaussian(3, 4), torch.ones(3, 4))),
    "reciprocal of a softplus": (lambda h: 1 / F.softplus(h), (gaussian(3, 4),)),
    "expanded power": (lambda x: x**-0.5, (GaussianMoments(torch.full((3,), 5.0), torch.full((3,), 0.01)),)),
    "power by a tensor": (lambda x, p: x**p, (gaussian(3, 4), torch.tensor(2.0))),
    "softmax": (lambda x: F.softmax(x, -1), (gaussian(3, 4),)),
    "log_softmax": (lambda x: F.log_softmax(x, -1), (gaussian(3, 4),)),
    "logsumexp": (lambda x: torch.logsumexp(x, -1), (gaussian(3, 4),)),
    "glu": (lambda x: F.glu(x, -1), (gaussian(3, 4),)),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        tuple(test_arithmetic.gaussian(2, 3, 4, seed=k) for k in range(3)),
    ),
    "indexing": (
        lambda x, rows, mask: (x[rows], x[mask], x[1:, None]),
        (gaussian(3, 4), torch.tensor([2, 0]), torch.ones(3) > 0),
    ),
}


@pytest.mark.parametrize("name", FURTHER)
def test_further_function(name, device):
    function, given = FURTHER[name]
    check_same(function(*moved(given, device)), function(*given), device)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "LSTM": (lambda: nn.LSTM(3, 2, num_layers=2, bidirectional=True), (4, 2, 3)),
    "GRU": (lambda: nn.GRU(3, 2, batch_first=True), (4, 2, 3)),
    "RNN": (lambda: nn.RNN(3, 2), (4, 2, 3)),
    "LSTM cell": (lambda: nn.LSTMCell(3, 2), (4, 3)),
    "transformer": (lambda: nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0), (3, 2, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer_with_uncertain_weights(name, device):
    make, shape = LAYERS[name]

    def outputs(where: torch.device | str) -> Any:
        torch.manual_seed(0)
        layer, x = make().to(DTYPE), torch.randn(shape, dtype=DTYPE)
        for path, parameter in list(layer.named_parameters()):
            owner = layer.get_submodule(path.rpartition(".")[0])
            last = path.rpartition(".")[2]
            del owner._parameters[last]
            w = parameter.detach().to(where)
            noise = torch.full((1,) * w.dim(), 0.1, dtype=DTYPE, device=where)
            object.__setattr__(owner, last, MultiplicativeMoments(w, noise))
        return layer(x.to(where))

    check_same(outputs(device), outputs("cpu"), device)
