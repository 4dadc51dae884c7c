# SPDX-License-Identifier: Apache-2.0
"""Predictors of Laplace posteriors equal ``predict``, for any number of rows, and also when exported with torch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyro_dvi as dvi
from pyro_dvi.bayesian import Heteroscedastic
from pyro_dvi.laplace import ConjugateGradient, Dense, Diagonal, KroneckerFactored, TopEigen

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
LABELS = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()
TARGETS = {
    "one mean": (1, X.sum(1)),
    "two means": (2, X[:, :2]),
    "two classes": (2, LABELS.clamp_max(1)),
    "one logit": (1, LABELS.clamp_max(1)),
    "three classes": (3, LABELS),
}
CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.float64: {"rtol": 1e-10, "atol": 1e-10}}


def network(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, width))


def fitted(target: str, dtype: torch.dtype, method: Any) -> Any:
    width, y = TARGETS[target]
    y = y.to(dtype) if y.is_floating_point() else y
    return method.fit(network(width).to(dtype), [(X.to(dtype), y)], 5, progress=False)


def check(posterior: Any, dtype: torch.dtype, x: Tensor = X) -> Any:
    """Compare a predictor with predictions for other inputs than those of its example, and for one input."""
    x = x.to(dtype)
    serve, far = posterior.export(x[:4]), torch.cat([3 * x, x])
    for rows in (far, far[:1]):
        found, expected = serve(rows), posterior.predict(rows)
        torch.testing.assert_close(found.mean, expected.mean, **CLOSE[dtype])
        torch.testing.assert_close(found.variance, expected.variance, **CLOSE[dtype])
        if found.epistemic is not None:
            torch.testing.assert_close(found.epistemic, expected.epistemic, **CLOSE[dtype])
    return serve


@pytest.mark.every(5)
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("covariance", [Dense(), Diagonal(), KroneckerFactored()], ids=repr)
@pytest.mark.parametrize("target", TARGETS)
def test_last_layers(target: str, covariance: Any, dtype: torch.dtype) -> None:
    check(fitted(target, dtype, dvi.Laplace(covariance=covariance)), dtype)


@pytest.mark.parametrize("target", ["two means", "three classes"])
def test_exported_with_torch(target: str) -> None:
    posterior = fitted(target, torch.float64, dvi.Laplace())
    serve, x = check(posterior, torch.float64), X.double()
    program = torch.export.export(serve, (x[:5],), dynamic_shapes=[({0: torch.export.Dim("rows")},)])
    for rows in (x, x[:2]):
        torch.testing.assert_close(
            program.module()(rows)[0], posterior.predict(rows).mean, rtol=0, atol=1e-10
        )
        torch.testing.assert_close(
            program.module()(rows)[1], posterior.predict(rows).variance, rtol=0, atol=1e-10
        )


@pytest.mark.parametrize(
    "target, method",
    [
        ("three classes", dvi.Laplace(layers=None)),
        ("three classes", dvi.Laplace(layers=None, covariance=KroneckerFactored())),
        ("two classes", dvi.Ensemble(dvi.Laplace(), 2)),
    ],
    ids=["all layers", "all layers, factored", "ensemble"],
)
def test_other_laplace_posteriors(target: str, method: Any) -> None:
    check(fitted(target, torch.float64, method), torch.float64)


def test_an_uncertain_noise_scale() -> None:
    method = dvi.Laplace(noise_scale=Heteroscedastic(), covariance=TopEigen(3))
    check(
        method.fit(network(2).double(), [(X.double(), X.double().sum(1))], 5, progress=False), torch.float64
    )


def test_convolutional_layers_that_share_their_weights() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)).double()
    x = torch.randn(40, 1, 3, 3, dtype=torch.float64)
    check(dvi.Laplace(layers=None).fit(net, [(x, LABELS)], 5, progress=False), torch.float64, x)


def test_methods_without_a_root_of_the_covariance_are_named() -> None:
    posterior = fitted(
        "one mean",
        torch.float32,
        dvi.Laplace(covariance=ConjugateGradient(), prior_scale=1.0, noise_scale=0.5),
    )
    with pytest.raises(dvi.errors.UnsupportedError, match=r"Linearised.* cannot be prepared.*Use predict"):
        posterior.export(X[:4])
