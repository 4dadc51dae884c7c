# SPDX-License-Identifier: Apache-2.0
"""What users do with moments that has no answer: the error says what to do instead."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments import GaussianMoments


def gaussian(*shape: int) -> Any:
    generator = torch.Generator().manual_seed(0)
    return GaussianMoments(torch.randn(shape, generator=generator), torch.rand(shape, generator=generator))


X, T = gaussian(2, 3), torch.ones(2, 3)


def branch(x: Any) -> Any:
    return x if x.sum() > 0 else -x


def loop(x: Any) -> Any:
    while abs(float(x.sum())) > 1:
        x = x / 2
    return x


def early_exit(x: Any) -> Any:
    return x if (x == 0).all() else x.relu()


VALUES: dict[str, Callable[[Any], Any]] = {
    "if x.sum() > 0": branch,
    "while float(x)": loop,
    "(x == 0).all()": early_exit,
    "if x": lambda x: 1 if x else 0,
    "float(x)": lambda x: float(x.sum()),
    "int(x)": lambda x: int(x.sum()),
    "x.item()": lambda x: x.sum().item(),
    "x.tolist()": lambda x: x.tolist(),
    "x.numpy()": lambda x: x.numpy(),
    "np.asarray(x)": np.asarray,
    "max(x, 0)": lambda x: max(x.sum(), 0),
    "range(x)": lambda x: range(x.sum()),
    "x in [1]": lambda x: x in [1],
}


@pytest.mark.parametrize("call", VALUES.values(), ids=VALUES)
def test_what_asks_for_a_value_is_refused(call: Callable) -> None:
    with pytest.raises(UnsupportedError, match=r"x\.loc"):
        call(X)


REFUSALS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "if tensor > x": (lambda x: bool(T > x), r"x\.loc"),
    "tensor == x": (lambda x: T == x, r"x\.loc, the mean"),
    "torch.ne": (lambda x: torch.ne(x, 0), r"x\.loc, the mean"),
    "x.eq(0)": (lambda x: x.eq(0), r"x\.loc, the mean"),
    "torch.where(x > 0, x, y)": (lambda x: torch.where(x > 0, x, 0.1 * x), r"x\.loc"),
    "x[x < 0] = 0": (lambda x: x.__setitem__(x < 0, 0.0), r"x\.loc, the mean"),
    "x.masked_fill(x < 0, 0)": (lambda x: x.masked_fill(x < 0, 0.0), r"x\.loc, the mean"),
    "an index": (lambda x: x[x], "deterministic"),
    "x.cummax(0)": (lambda x: x.cummax(0), "largest"),
    "x.argmax(-1)": (lambda x: x.argmax(-1), r"x\.loc, the mean"),
    "x.topk(2)": (lambda x: x.topk(2), r"x\.loc, the mean"),
    "torch.aminmax": (lambda x: torch.aminmax(x), r"x\.loc, the mean"),
    "x.std(-1)": (lambda x: x.std(-1), r"x\.loc, the mean"),
    "torch.var": (lambda x: torch.var(x, 1), r"x\.loc, the mean"),
    "x.round()": (lambda x: x.round(), r"x\.loc"),
    "F.cross_entropy": (lambda x: F.cross_entropy(x, torch.tensor([0, 1])), r"x\.loc, the mean"),
    "nn.MSELoss": (lambda x: nn.MSELoss()(x, T), r"x\.loc, the mean"),
    "x.backward()": (lambda x: x.sum().backward(), r"x\.loc, the mean"),
    "out=": (lambda x: torch.add(x, T, out=torch.empty(2, 3)), "drop the argument out"),
    "out= of a tensor": (lambda x: torch.matmul(T, x.t(), out=torch.empty(2, 2)), "drop the argument out"),
    "tensor.add_(x)": (lambda x: torch.ones(2, 3).add_(x), "no variance"),
    "tensor[0] = x": (lambda x: torch.ones(2, 3).__setitem__(0, x[0]), r"torch\.stack"),
    "tensor[0] += x": (lambda x: exec("t[0] += x", {"t": torch.ones(2, 3), "x": x[0]}), r"torch\.stack"),
    "x % 2": (lambda x: x % 2, r"x\.loc, the mean"),
    "2 % x": (lambda x: 2 % x, r"x\.loc, the mean"),
    "tensor % x": (lambda x: T % x, r"x\.loc, the mean"),
    "x // 2": (lambda x: x // 2, r"x\.loc, the mean"),
    "2 // x": (lambda x: 2 // x, r"x\.loc, the mean"),
    "~x": (lambda x: ~x, r"x\.loc, the mean"),
    "f-string": (lambda x: f"{x.sum():.2f}", r"x\.loc"),
    "torch.distributions": (lambda x: bool(x), r"pyro\.distributions"),
    "torch.special": (lambda x: torch.special.bessel_j0(x), r"^torch\.special\.bessel_j0 has no rule"),
    "torch.linalg": (lambda x: torch.linalg.det(x), r"@moment_rule\(torch\.linalg\.det\)"),
    "no rule": (lambda x: torch.fft.fft(x), r"^torch\.fft\.fft has no rule"),
    "no rule, method": (lambda x: x.cholesky(), "moment_rule"),
}


@pytest.mark.parametrize(("call", "words"), REFUSALS.values(), ids=REFUSALS)
def test_a_refusal_says_what_to_do(call: Callable, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        call(gaussian(2, 3))


def test_a_tensor_made_of_uncertain_numbers_is_refused() -> None:
    with pytest.raises(TypeError, match=r"x\.loc"):
        torch.tensor([X.sum(), X.sum()])


def test_numpy_functions_are_refused() -> None:
    with pytest.raises((UnsupportedError, TypeError), match=r"x\.loc|__array_ufunc__"):
        np.exp(X)
    with pytest.raises((UnsupportedError, TypeError)):
        np.ones((2, 3)) * X


def test_an_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="spam"):
        _ = X.spam
    assert not hasattr(X, "spam")


def test_the_error_inside_a_module_names_the_torch_function() -> None:
    class Spectral(nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.linalg.svdvals(x)

    with pytest.raises(UnsupportedError, match="svdvals has no rule"):
        nn.Sequential(nn.Linear(3, 3), Spectral())(X)


def test_a_decision_on_the_mean_is_allowed() -> None:
    y = torch.where(X.loc > 0, X, 0 * X)
    assert y.variance[X.loc <= 0].eq(0).all()
    assert X[torch.arange(2), X.loc.argmax(-1)].shape == (2,)
