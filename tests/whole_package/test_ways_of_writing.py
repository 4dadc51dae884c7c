# SPDX-License-Identifier: Apache-2.0
"""One linear model, written in several ways: every method gives the same numbers, or says what it cannot take."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor, nn

import pyro_dvi as dvi
from pyro_dvi import curvature, laplace
from pyro_dvi.errors import DviWarning, UnsupportedError

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(6) % 2
NET = nn.Linear(3, 2)
Outputs = Callable[[Tensor, Tensor, Tensor], Any]


class Product(torch.autograd.Function):
    """x W', by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, w = ctx.saved_tensors
        return gradients[0] @ w, gradients[0].T @ x


def plain(x: Tensor, w: Tensor, b: Tensor) -> Any:
    return x @ w.T + b


WAYS: dict[str, Outputs] = {
    "functional_call": lambda x, w, b: torch.func.functional_call(NET, {"weight": w, "bias": b}, (x,)),
    "mm": lambda x, w, b: torch.mm(x, mat2=w.T) + b,
    "addmm": lambda x, w, b: torch.addmm(b, mat2=w.T, mat1=x),
    "addmm by name": lambda x, w, b: torch.addmm(input=b, mat1=x, mat2=w.T),
    "method addmm": lambda x, w, b: b.addmm(x, mat2=w.T),
    "bmm": lambda x, w, b: torch.bmm(input=x[None], mat2=w.T[None])[0] + b,
    "baddbmm": lambda x, w, b: torch.baddbmm(b.expand(1, len(x), 2), batch1=x[None], batch2=w.T[None])[0],
    "mv": lambda x, w, b: torch.stack([torch.mv(x, vec=row) for row in w], -1) + b,
    "addmv": lambda x, w, b: torch.stack(
        [torch.addmv(shift, mat=x, vec=row) for shift, row in zip(b, w, strict=True)], -1
    ),
}


def model_of(outputs: Outputs) -> Callable[..., Any]:
    def model(x: Tensor, y: Tensor | None = None) -> Any:
        w = pyro.sample("w", dist.Normal(torch.zeros(2, 3), 1.0).to_event(2))
        b = pyro.sample("b", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        logits = outputs(x, w, b)
        with pyro.plate("data", 6, subsample_size=len(x)):
            return pyro.sample("y", dist.Categorical(logits=logits), obs=y)

    return model


def step(make: Callable[[Any], tuple[Any, Any, Any]]) -> Callable[[Any], Tensor]:
    def method(model: Any) -> Tensor:
        svi = SVI(model, *make(model))
        return torch.tensor([svi.step(X, Y), svi.step(X, Y)])

    return method


def fitted(method: Any) -> Callable[[Any], Tensor]:
    def run(model: Any) -> Tensor:
        guide = dvi.LaplaceGuide(model)
        guide.initialize(X, Y)
        guide.fit([(X, Y)], method, unconverged="accept")
        return guide.predictive(X).variance

    return run


def predicted(rule: Any, guide: Any = dvi.MeanFieldGuide) -> Callable[[Any], Tensor]:
    def run(model: Any) -> Tensor:
        posterior = guide(model)
        posterior(X, Y)
        return dvi.predict(model, posterior, X, rule).probabilities

    return run


BY_MOMENTS: dict[str, Callable[[Any], Tensor]] = {
    "moments": step(
        lambda m: (dvi.MeanFieldGuide(m), dvi.optim.Adam({"lr": 0.1}), dvi.MomentPropagationELBO())
    ),
    "multiplicative noise": step(
        lambda m: (dvi.MultiplicativeNoiseGuide(m), dvi.optim.Adam({"lr": 0.1}), dvi.MomentPropagationELBO())
    ),
    "predicted by moments": predicted(dvi.Moments()),
    "reverse delta": predicted(dvi.Moments(propagation=dvi.ReverseDelta())),
}
METHODS: dict[str, Callable[[Any], Tensor]] = {
    "Taylor": step(
        lambda m: (
            dvi.MeanFieldGuide(m),
            dvi.optim.Adam({"lr": 0.1}),
            dvi.TaylorELBO(curvature=curvature.GGNDiagonal()),
        )
    ),
    "VOGN": step(lambda m: (dvi.NaturalGradientGuide(m), dvi.VOGN({"lr": 0.1}), dvi.NaturalGradientELBO())),
    "Dense": fitted(laplace.Dense()),
    "Diagonal": fitted(laplace.Diagonal()),
    "ConjugateGradient": fitted(laplace.ConjugateGradient()),
    "AtMean": predicted(dvi.AtMean()),
    **BY_MOMENTS,
}


def numbers(method: Callable[[Any], Tensor], outputs: Outputs) -> Tensor:
    pyro.clear_param_store()
    torch.manual_seed(0)
    return method(model_of(outputs))


@pytest.mark.every(4)
@pytest.mark.parametrize("method", METHODS)
def test_same_numbers(method):
    expected = numbers(METHODS[method], plain)
    for name, way in WAYS.items():
        torch.testing.assert_close(
            numbers(METHODS[method], way), expected, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in NET.parameters())


@pytest.mark.parametrize("method", METHODS)
def test_vmap(method):
    def by_rows(x: Tensor, w: Tensor, b: Tensor) -> Any:
        return torch.vmap(lambda row: w @ row + b)(x)

    if method in BY_MOMENTS:
        with pytest.raises(UnsupportedError, match=r"torch\.vmap or torch\.func: .*for all rows at once"):
            numbers(METHODS[method], by_rows)
    else:
        torch.testing.assert_close(numbers(METHODS[method], by_rows), numbers(METHODS[method], plain))


@pytest.mark.parametrize("method", ["moments", "multiplicative noise"])
def test_a_function_with_a_backward_of_its_own(method):
    first = torch.eye(3, requires_grad=True)

    def by_hand(x: Tensor, w: Tensor, b: Tensor) -> Any:
        return Product.apply(x @ first, w) + b

    with pytest.raises(
        UnsupportedError, match=r"by_hand, line \d+, calls a custom torch\.autograd\.Function"
    ):
        numbers(METHODS[method], by_hand)


@pytest.mark.parametrize("method", ["Taylor", "VOGN", "Dense", "Diagonal", "ConjugateGradient"])
@pytest.mark.filterwarnings(f"ignore::{DviWarning.__module__}.{DviWarning.__name__}")  # slow for VOGN
def test_complex_weights(method):
    """The flat vector of the latents has the weight at an odd place."""

    def pairs(x: Tensor, w: Tensor, b: Tensor) -> Any:
        products = x.to(torch.cfloat) @ torch.view_as_complex(w).T
        return torch.view_as_real(products).square().sum(-1) + b

    def real(x: Tensor, w: Tensor, b: Tensor) -> Any:
        return (x @ w[..., 0].T).square() + (x @ w[..., 1].T).square() + b

    def model_of(outputs: Outputs) -> Callable[..., Any]:
        def model(x: Tensor, y: Tensor | None = None) -> Any:
            b = pyro.sample("b", dist.Normal(torch.zeros(1), 1.0).to_event(1))
            w = pyro.sample("w", dist.Normal(torch.zeros(2, 3, 2), 1.0).to_event(3))
            with pyro.plate("data", 6, subsample_size=len(x)):
                return pyro.sample("y", dist.Categorical(logits=outputs(x, w, b)), obs=y)

        return model

    found = []
    for outputs in (pairs, real):
        pyro.clear_param_store()
        torch.manual_seed(0)
        found.append(METHODS[method](model_of(outputs)))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
