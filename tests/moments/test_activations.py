# SPDX-License-Identifier: Apache-2.0
"""Rules of nonlinear functions of each element."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.quadrature import constants
from pyro_dvi.moments.tensor_like import ENTRIES
from tests.moments.battery import CHECKS, Case, name_of_check

NARROW = (1e-4, 1e-2, 0.1, 0.3, 1.0)  # where exponentials stay finite in float32


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
    Case(F.hardsigmoid, kinks=(-3.0, 3.0)),
    Case(F.hardswish, kinks=(-3.0, 3.0), tolerance=(1e-8, 5e-4)),  # terms cancel in the left tail
    Case(torch.abs, kinks=(0.0,)),
    Case(torch.absolute, kinks=(0.0,)),
    Case(F.leaky_relu, kinks=(0.0,)),
    Case(F.leaky_relu, args=(0.3,), kinks=(0.0,)),
]
EXPONENTIALS = [
    Case(F.elu, kinks=(0.0,)),
    Case(F.elu, args=(1.7,), kinks=(0.0,)),
    Case(F.selu, kinks=(0.0,)),
    Case(torch.selu, kinks=(0.0,)),
    Case(torch.exp, scales=NARROW, domain=(-15.0, 15.0)),
]
WAVES = [Case(f, scales=(*NARROW, 2.0), domain=(-40.0, 40.0)) for f in (torch.sin, torch.cos)]
CASES = [
    *CORNERS,
    *STEPS,
    Case(torch.special.erf),
    *RAMPS,
    *EXPONENTIALS,
    *WAVES,
]


# One case of each rule and its options goes through all checks; other names of a function only through the last three.
FIRST = {(ENTRIES[case.func].rule, case.args, str(case.kwargs)): case for case in reversed(CASES)}.values()


@pytest.mark.parametrize("check", CHECKS, ids=name_of_check)
@pytest.mark.parametrize("case", FIRST, ids=str)
def test_rule(case: Case, check: Callable[[Case], None]) -> None:
    check(case)


@pytest.mark.parametrize("check", CHECKS[-3:], ids=name_of_check)
@pytest.mark.parametrize("case", [case for case in CASES if case not in [*FIRST]], ids=str)
def test_other_names_of_a_function(case: Case, check: Callable[[Case], None]) -> None:
    check(case)


def x_of(*shape: int) -> GaussianMoments:
    generator = torch.Generator().manual_seed(2)
    loc = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return GaussianMoments(loc, 0.1 + torch.rand(*shape, generator=generator, dtype=torch.float64))


MODULES = [
    *(
        nn.ReLU(),
        nn.ReLU6(),
        nn.Hardtanh(),
        nn.Hardsigmoid(),
        nn.Hardswish(),
        nn.LeakyReLU(),
    ),
    *(
        nn.ELU(),
        nn.SELU(),
        nn.GELU(),
        nn.SiLU(),
    ),
    *(
        nn.GELU("tanh"),
        nn.Softplus(),
        nn.Mish(),
        nn.LogSigmoid(),
        nn.Tanh(),
        nn.Sigmoid(),
    ),
]


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_modules_find_their_rule(module: nn.Module) -> None:
    y = module(GaussianMoments(torch.tensor([0.7]), torch.tensor([1e-8])))
    torch.testing.assert_close(y.loc, module(torch.tensor([0.7])), rtol=1e-5, atol=1e-5)
    assert y.variance.item() < 2e-8


def test_clamp_refuses_bounds_that_are_tensors() -> None:
    with pytest.raises(UnsupportedError, match="bounds of a clamp of moments must be numbers"):
        x_of(3).clamp(torch.zeros(3))


@pytest.mark.parametrize(
    "function", [F.silu, F.gelu, F.hardswish, F.elu, torch.tanh], ids=lambda f: f.__name__
)
def test_blocks_and_strides_do_not_matter(function: Callable) -> None:
    """More elements than a block, not contiguous, narrow and wide: the same as one at a time."""
    x = x_of(70, 130)
    x = GaussianMoments(x.loc.T, (x.variance * torch.linspace(0.01, 20, 70, dtype=torch.float64)[:, None]).T)
    y = function(x)
    for i, j in [(0, 0), (129, 69), (64, 3), (7, 50)]:
        one = function(GaussianMoments(x.loc[i, j], x.variance[i, j]))
        torch.testing.assert_close(y.loc[i, j], one.loc, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(y.variance[i, j], one.variance, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("function", [F.silu, F.hardtanh, F.elu], ids=lambda f: f.__name__)
def test_half_precision_is_computed_in_float32(function: Callable) -> None:
    x = GaussianMoments(torch.tensor([0.5, -1.0]).bfloat16(), torch.tensor([0.25, 2.0]).bfloat16())
    y = function(x)
    expected = function(GaussianMoments(x.loc.float(), x.variance.float()))
    assert y.loc.dtype is y.variance.dtype is torch.bfloat16
    assert torch.equal(y.loc, expected.loc.bfloat16())
    assert torch.equal(y.variance, expected.variance.bfloat16())


def test_empty_moments_pass() -> None:
    for function in (F.silu, F.hardtanh, F.elu, F.relu):
        assert function(GaussianMoments(torch.zeros(0, 3), torch.zeros(0, 3))).shape == (0, 3)


@pytest.mark.parametrize("function", [F.silu, F.gelu, F.mish, torch.tanh], ids=lambda f: f.__name__)
def test_without_a_look_at_the_values(function: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """On accelerators and in compiled code both quadratures run on all elements."""
    x = x_of(200)
    x = GaussianMoments(x.loc, x.variance * torch.linspace(0.01, 20, 200, dtype=torch.float64))
    expected = function(x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    y = function(x)
    torch.testing.assert_close(y.loc, expected.loc, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(y.variance, expected.variance, rtol=1e-12, atol=1e-14)


@pytest.mark.every(2)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo of torch 2.8
@pytest.mark.parametrize(
    "function",
    # Compiling takes seconds; a smooth step and a smooth ramp stand for the others.
    [F.gelu, torch.tanh, *(pytest.param(f, marks=pytest.mark.soak) for f in (F.silu, F.softplus, F.mish))],
    ids=lambda f: f.__name__,
)
def test_compiled_code_has_no_breaks(function: Callable) -> None:
    x = x_of(40).float()  # fewer nodes than float64, and compiling takes time for each

    def model(loc: torch.Tensor, variance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = function(GaussianMoments(loc, variance))
        return y.loc, y.variance

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    inputs = [x.loc.requires_grad_(), (4 * x.variance).requires_grad_()]  # narrow and wide
    expected, found = model(*inputs), compiled(*inputs)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        slopes = [torch.autograd.grad(t.sum(), inputs, retain_graph=True) for t in (a, b)]
        torch.testing.assert_close(*slopes, rtol=1e-4, atol=1e-5)


class Counted(TorchDispatchMode):
    """Counts calls of operators."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("function", "scale", "most"),
    [
        (F.relu, 1.0, 18),
        (F.leaky_relu, 1.0, 42),
        (F.gelu, 1.0, 130),
        (F.softplus, 0.3, 85),  # narrow Gaussians only
        (F.softplus, 3.0, 175),  # narrow and wide ones
        (torch.tanh, 1.0, 160),
        (F.mish, 1.0, 260),
    ],
)
def test_the_number_of_operator_calls_does_not_grow_with_the_nodes(
    function: Callable, scale: float, most: int
) -> None:
    x = x_of(40)
    loc, variance = x.loc.float().requires_grad_(), (scale**2 * x.variance / x.variance.max()).float()
    function(GaussianMoments(loc, variance))  # makes what is kept
    for dtype in (torch.float32, torch.float64):
        x = GaussianMoments(loc.to(dtype), variance.to(dtype))
        function(x)
        with Counted() as counted:
            function(x)
        assert counted.number <= most


def test_constants_are_made_once_and_can_take_part_in_training() -> None:
    x = torch.zeros(2)
    with torch.inference_mode():
        first = constants((0.125, 0.25), x)
    assert first is constants((0.125, 0.25), x)
    assert not first.is_inference()
    assert constants((0.125, 0.25), x.double()).dtype is torch.float64
