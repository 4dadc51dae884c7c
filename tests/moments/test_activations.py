# SPDX-License-Identifier: Apache-2.0
"""Rules of nonlinear functions of each element."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.moments.battery import CHECKS, Case, name_of_check

NARROW = (1e-4, 1e-2, 0.1, 0.3, 1.0)  # where exponentials stay finite in float32


def by_tangent(f: Callable) -> Callable:
    def oracle(mu: torch.Tensor, variance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mu = mu.detach().requires_grad_()
        y = f(mu)
        (slope,) = torch.autograd.grad(y.sum(), mu)
        return y.detach(), slope.square() * variance

    return oracle


STEPS = [Case(f) for f in (F.sigmoid, torch.sigmoid, torch.special.expit, F.tanh, torch.tanh, torch.erf)]
RAMPS = [
    Case(F.softplus),
    Case(F.softplus, kwargs={"beta": 2.0, "threshold": 40.0}),
    Case(F.logsigmoid),
    Case(F.silu),
    Case(F.gelu),
    Case(F.gelu, kwargs={"approximate": "tanh"}),
    Case(F.mish),
]
CORNERS = [
    Case(F.relu, kinks=(0.0,)),
    Case(torch.relu, kinks=(0.0,)),
    Case(F.relu6, kinks=(0.0, 6.0)),
    Case(F.hardtanh, kinks=(-1.0, 1.0)),
    Case(F.hardtanh, args=(-0.25, 2.5), kinks=(-0.25, 2.5)),
    Case(torch.clamp, args=(-0.5, 1.0), kinks=(-0.5, 1.0)),
    Case(torch.clamp, kwargs={"max": 1.0}, kinks=(1.0,)),
    Case(torch.clip, args=(-0.5, 1.0), kinks=(-0.5, 1.0)),
    Case(torch.clamp_min, args=(0.75,), kinks=(0.75,)),
    Case(torch.clamp_max, args=(0.75,), kinks=(0.75,)),
    Case(F.threshold, args=(0.125, 0.125), kinks=(0.125,)),
    Case(torch.threshold, args=(0.125, -0.5), jumps=(0.125,)),
    Case(F.hardsigmoid, kinks=(-3.0, 3.0)),
    Case(F.hardswish, kinks=(-3.0, 3.0), tolerance=(1e-8, 5e-4)),  # terms cancel in the left tail
    Case(torch.hardshrink, jumps=(-0.5, 0.5)),
    Case(F.softshrink, kinks=(-0.5, 0.5)),
    Case(torch.abs, kinks=(0.0,)),
    Case(torch.absolute, kinks=(0.0,)),
    Case(F.leaky_relu, kinks=(0.0,)),
    Case(F.leaky_relu, args=(0.3,), kinks=(0.0,)),
    Case(F.rrelu, kinks=(0.0,)),
    Case(torch.rrelu, kinks=(0.0,)),
    Case(torch.prelu, args=(torch.tensor(0.25, dtype=torch.float64),), kinks=(0.0,), note="0.25"),
]
EXPONENTIALS = [
    Case(F.elu, kinks=(0.0,)),
    Case(F.elu, args=(1.7,), kinks=(0.0,)),
    Case(F.celu, args=(0.6,), kinks=(0.0,)),
    Case(torch.celu, kinks=(0.0,)),
    Case(F.selu, kinks=(0.0,)),
    Case(torch.selu, kinks=(0.0,)),
    *(Case(f, scales=NARROW, domain=(-15.0, 15.0)) for f in (torch.exp, torch.expm1, torch.special.expm1)),
]
WAVES = [Case(f, scales=(*NARROW, 2.0), domain=(-40.0, 40.0)) for f in (torch.sin, torch.cos)]
TANGENTS = [
    Case(f, oracle=by_tangent(f), domain=(0.5, 9.0), scales=(1e-3, 0.1), reach=1e4)
    for f in (torch.log, torch.log1p, torch.special.log1p)
]
ROOTS = [
    Case(f, domain=(0.5, 9.0), scales=(1e-3, 0.05), reach=1e4, tolerance=(0.01, 0.01))
    for f in (torch.sqrt, torch.rsqrt)
]
CASES = [*CORNERS, *STEPS, Case(torch.special.erf), *RAMPS, *EXPONENTIALS, *WAVES, *TANGENTS, *ROOTS]


@pytest.mark.parametrize("check", CHECKS, ids=name_of_check)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rule(case: Case, check: Callable[[Case], None]) -> None:
    check(case)
