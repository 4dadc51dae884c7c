# SPDX-License-Identifier: Apache-2.0
"""Gated linear units against a grid over both halves."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pyro_dvi.moments import GaussianMoments


class Case(NamedTuple):
    func: Callable
    dim: int


CASES = [Case(F.glu, -1), Case(F.glu, 0)]
Z = torch.linspace(-9, 9, 401, dtype=torch.float64)
W = torch.softmax(-0.5 * Z.square(), 0)


def gaussian(*shape: int) -> GaussianMoments:
    generator = torch.Generator().manual_seed(7)
    loc, variance = (f(shape, generator=generator, dtype=torch.float64) for f in (torch.randn, torch.rand))
    return GaussianMoments(2 * loc, 2 * variance + 0.1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"dim={case.dim}")
def test_moments_are_exact(case: Case) -> None:
    x = gaussian(4, 6)
    y = case.func(x, case.dim)
    (a, b), (va, vb) = (t.chunk(2, case.dim) for t in (x.loc, x.variance))
    axes = (-1, 1, *(1,) * a.dim()), (1, -1, *(1,) * a.dim())
    first, second = a + va.sqrt() * Z.reshape(axes[0]), b + vb.sqrt() * Z.reshape(axes[1])
    weight = W.reshape(axes[0]) * W.reshape(axes[1])
    values = first * torch.sigmoid(second)
    mean = (weight * values).sum((0, 1))
    torch.testing.assert_close(y.loc, mean, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(
        y.variance, (weight * (values - mean).square()).sum((0, 1)), rtol=1e-7, atol=1e-8
    )


def test_the_module_is_the_function_and_certain_inputs_stay_certain() -> None:
    x = gaussian(4, 6)
    assert nn.GLU(dim=0)(x).loc.equal(F.glu(x, 0).loc)
    certain = F.glu(GaussianMoments(x.loc, torch.zeros_like(x.loc)))
    torch.testing.assert_close(certain.loc, F.glu(x.loc))
    assert certain.variance.max() < 1e-20


def test_gradients() -> None:
    def moments(loc: torch.Tensor, variance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = F.glu(GaussianMoments(loc, variance))
        return y.loc, y.variance

    x = gaussian(2, 4)
    assert torch.autograd.gradcheck(moments, (x.loc.requires_grad_(), x.variance.requires_grad_()))
