# SPDX-License-Identifier: Apache-2.0
"""Whole networks of one hidden layer against sampled weights, and against quadrature.

With certain inputs the hidden units of one example are independent Gaussians, so the moments of the outputs are exact
for every activation whose rule is.
"""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.bilinear import MultiplicativeMoments
from tests.moments.battery import quadrature

INPUTS, HIDDEN, OUTPUTS, EXAMPLES = 3, 24, 2, 5
DRAWS = 50_000
ACTIVATIONS: list[tuple[Callable, tuple[float, ...]]] = [
    (F.relu, (0.0,)),
    (F.leaky_relu, (0.0,)),
    (F.relu6, (0.0, 6.0)),
    (F.hardtanh, (-1.0, 1.0)),
    (F.hardsigmoid, (-3.0, 3.0)),
    (F.hardswish, (-3.0, 3.0)),
    (torch.abs, (0.0,)),
    (F.elu, (0.0,)),
    (F.selu, (0.0,)),
    (F.gelu, ()),
    (partial(F.gelu, approximate="tanh"), ()),
    (F.silu, ()),
    (F.softplus, ()),
    (F.mish, ()),
    (F.logsigmoid, ()),
    (torch.tanh, ()),
    (torch.sigmoid, ()),
    (torch.erf, ()),
    (torch.sin, ()),
    (torch.cos, ()),
    (torch.exp, ()),
]


def name(value: object) -> str | None:
    if isinstance(value, partial):
        return value.func.__name__ + "_tanh"
    return getattr(value, "__name__", None)


def weights(kind: str) -> list[GaussianMoments]:
    """Weights and biases of two layers, of pre-activations with deviations around one."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(HIDDEN, INPUTS), (HIDDEN,), (OUTPUTS, HIDDEN), (OUTPUTS,)]
    result = []
    for shape in shapes:
        loc = torch.randn(shape, generator=generator, dtype=torch.float64) / math.sqrt(shape[-1])
        noise = 0.1 + torch.rand(shape, generator=generator, dtype=torch.float64)
        if kind == "multiplicative":
            columns = noise[:1] if len(shape) == 2 else noise
            result.append(MultiplicativeMoments(loc, columns))
        else:
            result.append(GaussianMoments(loc, noise / shape[-1]))
    return result


def network(
    activation: Callable,
    x: Tensor,
    w1: GaussianMoments,
    b1: GaussianMoments,
    w2: GaussianMoments,
    b2: GaussianMoments,
) -> GaussianMoments:
    return F.linear(activation(F.linear(x, w1, b1)), w2, b2)


def inputs() -> Tensor:
    return torch.randn(EXAMPLES, INPUTS, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


@pytest.mark.parametrize("kind", ["mean-field", "multiplicative"])
@pytest.mark.parametrize(("activation", "kinks"), ACTIVATIONS, ids=name)
def test_quadrature(activation: Callable, kinks: tuple[float, ...], kind: str) -> None:
    """The same network with each hidden unit integrated numerically."""
    x, (w1, b1, w2, b2) = inputs(), weights(kind)
    y = network(activation, x, w1, b1, w2, b2)
    mean = x @ w1.loc.T + b1.loc
    variance = x.square() @ w1.variance.T + b1.variance
    hidden = quadrature(activation, mean, variance, kinks)
    second = hidden.variance + hidden.mean.square()
    expected = hidden.variance @ w2.loc.square().T + second @ w2.variance.T + b2.variance
    torch.testing.assert_close(y.loc, hidden.mean @ w2.loc.T + b2.loc, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(y.variance, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", ["mean-field", "multiplicative"])
def test_sampled_weights(kind: str) -> None:
    """Means and deviations over 50,000 draws of the weights, the same draws for every activation.

    Of 26 activations, 5 examples, 2 outputs, two statistics and two families of weights, none is further than 4.5
    standard errors: by chance alone, one is in 0.7 % of all seeds (960 times 6.8e-6, were they independent).
    """
    x, parameters = inputs(), weights(kind)
    total, chunk = DRAWS, 10_000
    generator = torch.Generator().manual_seed(11)
    sums = {
        activation: torch.zeros(4, EXAMPLES, OUTPUTS, dtype=torch.float64) for activation, _ in ACTIVATIONS
    }
    expected = {activation: network(activation, x, *parameters) for activation, _ in ACTIVATIONS}
    for _ in range(total // chunk):
        w1, b1, w2, b2 = (
            p.loc + p.variance.sqrt() * torch.randn(chunk, *p.shape, generator=generator, dtype=torch.float64)
            for p in parameters
        )
        before = torch.einsum("ei,shi->seh", x, w1) + b1[:, None]
        for activation, _ in ACTIVATIONS:
            y = torch.einsum("seh,soh->seo", activation(before), w2) + b2[:, None]
            d = y - expected[activation].loc
            sums[activation] += torch.stack([(d**k).sum(0) for k in (1, 2, 3, 4)])
    for activation, _ in ACTIVATIONS:
        if activation is torch.exp:
            continue  # fourth moments of log-normals: no standard error at this number of draws
        first, second, _, fourth = sums[activation] / total
        variance = expected[activation].variance
        z_mean = first / (variance / total).sqrt()
        z_variance = (second - variance) / ((fourth - second.square()) / total).sqrt()
        assert z_mean.abs().max() < 4.5, name(activation)
        assert z_variance.abs().max() < 4.5, name(activation)


def test_a_wrong_variance_is_found() -> None:
    """The check by sampling sees an error of two percent in the deviation."""
    y = network(F.relu, inputs(), *weights("mean-field"))
    error = y.variance * (1.02**2 - 1)
    standard_error = y.variance * math.sqrt(2 / DRAWS)  # of a Gaussian
    assert (error / standard_error).min() > 4.5
