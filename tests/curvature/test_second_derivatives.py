# SPDX-License-Identifier: Apache-2.0
"""Hand-written second derivatives against PyTorch's own, which compose many more kernels."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from pyro_dvi.curvature import second_derivatives
from pyro_dvi.curvature.second_derivatives import FastSecondDerivatives
from pyro_dvi.errors import UnsupportedError
from tests.core.kernels import kernels_on_cpu


@dataclass(frozen=True)
class Case:
    """One call of a replaced function; ``shapes`` are those of its differentiable arguments."""

    name: str
    functions: tuple[Callable, ...]
    call: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]

    def inputs(self, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        draws = [torch.randn(s, dtype=torch.float64, generator=generator) for s in self.shapes]
        return [t.to(dtype).requires_grad_() for t in draws]


def conv(dims: int, x: tuple, w: tuple, bias: bool = False, **options: Any) -> Case:
    function = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
    shapes = (x, w, (w[0],)) if bias else (x, w)
    name = ", ".join([f"conv{dims}d", *(["bias"] if bias else []), *(f"{k}={v}" for k, v in options.items())])
    return Case(name, (function,), lambda x, w, b=None: function(x, w, b, **options), shapes)


def batch_norm(shape: tuple[int, ...]) -> Case:
    def call(x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, gamma, beta, training=True)

    return Case(f"batch_norm{len(shape)}", (F.batch_norm,), call, (shape, (shape[1],), (shape[1],)))


CASES = [
    conv(1, (3, 2, 7), (4, 2, 3), bias=True),
    conv(1, (3, 4, 9), (6, 2, 3), stride=2, padding=1, groups=2),
    conv(1, (2, 3, 8), (3, 1, 2), bias=True, dilation=(2,), groups=3),
    conv(2, (3, 2, 5, 6), (4, 2, 3, 2)),
    conv(2, (2, 2, 5, 6), (4, 2, 3, 3), bias=True, stride=2, padding=1),
    conv(2, (2, 4, 6, 5), (4, 2, 3, 2), bias=True, stride=(1, 2), padding=(2, 0), dilation=(2, 1), groups=2),
    conv(2, (2, 3, 4, 4), (3, 1, 3, 3), padding=1, groups=3),
    conv(2, (2, 3, 4, 4), (2, 3, 1, 1), bias=True, stride=(2,)),
    conv(3, (2, 2, 3, 4, 3), (2, 2, 2, 2, 2), bias=True),
    conv(3, (2, 2, 4, 4, 4), (4, 1, 2, 3, 2), stride=2, padding=1, groups=2),
    Case("softplus", (F.softplus,), lambda x: F.softplus(8 * x), ((3, 4),)),  # partly beyond its threshold
    batch_norm((7, 3)),
    batch_norm((4, 3, 5)),
    batch_norm((3, 2, 4, 3)),
    batch_norm((2, 2, 3, 2, 3)),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


def fast(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(*inputs: Tensor) -> Tensor:
        with FastSecondDerivatives():
            return call(*inputs)

    return run


@pytest.fixture(autouse=True)
def _kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Replace on the CPU what is replaced only on a GPU."""
    case = getattr(request.node, "callspec", None) and request.node.callspec.params.get("case")
    with (
        kernels_on_cpu()
        if case and case.name == "softplus" and "device" not in request.fixturenames
        else nullcontext()
    ):
        yield


def derivatives(call: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[Tensor, tuple, tuple]:
    """Value, gradient of a non-linear function of it, and gradient of a squared-gradient penalty."""
    y = call(*inputs)
    first = torch.autograd.grad(torch.tanh(y).mul(y.detach() + 1).sum(), inputs, create_graph=True)
    penalty = torch.stack(
        [(g.square() * torch.linspace(0.5, 2, g.numel(), dtype=g.dtype).view_as(g)).sum() for g in first]
    )
    return y, first, torch.autograd.grad(penalty.sum(), inputs)


def test_every_replaced_function_has_a_case():
    assert {f for case in CASES for f in case.functions} == set(second_derivatives._REPLACED)


@every_case
def test_value_first_and_second_derivatives_are_those_of_pytorch(case):
    inputs = case.inputs()
    for ours, native in zip(
        derivatives(fast(case.call), inputs), derivatives(case.call, inputs), strict=True
    ):
        torch.testing.assert_close(ours, native, atol=1e-10, rtol=1e-10)


@every_case
def test_the_replacement_is_used(case):
    node = fast(case.call)(*case.inputs()).grad_fn
    assert node is not None and type(node).__name__.startswith(("_Convolution", "BatchNorm", "_Node"))


@pytest.mark.parametrize("case", [CASES[k] for k in (1, 5, 8, 10, 11, 13)], ids=lambda c: c.name)
def test_numerical_derivatives(case):
    inputs = case.inputs()
    assert gradcheck(fast(case.call), inputs)
    assert gradgradcheck(fast(case.call), inputs, fast_mode=True)


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 1), (1, 2)])
@pytest.mark.parametrize("case", [CASES[5], CASES[13]], ids=lambda c: c.name)
def test_any_subset_of_the_arguments_may_need_gradients(case, needed):
    inputs = [t.requires_grad_(k in needed) for k, t in enumerate(case.inputs())]
    leaves = [inputs[k] for k in needed]

    def penalty_gradient(call: Callable[..., Tensor]) -> tuple:
        first = torch.autograd.grad(torch.tanh(call(*inputs)).sum(), leaves, create_graph=True)
        total = torch.stack([g.square().sum() for g in first]).sum()
        return torch.autograd.grad(total, leaves)

    torch.testing.assert_close(
        penalty_gradient(fast(case.call)), penalty_gradient(case.call), atol=1e-10, rtol=1e-10
    )


@every_case
def test_single_precision(case):
    ours = derivatives(fast(case.call), case.inputs(torch.float32))
    exact = derivatives(case.call, case.inputs())
    for a, b in zip(ours[2], exact[2], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-3 * float(b.abs().max()))


@pytest.mark.parametrize("case", [c for c in CASES if "batch_norm" not in c.name], ids=lambda c: c.name)
def test_third_derivatives(case):
    inputs = case.inputs()

    def third(call: Callable[..., Tensor]) -> tuple:
        first = torch.autograd.grad(call(*inputs).tanh().sum(), inputs, create_graph=True)
        total = torch.stack([g.square().sum() for g in first]).sum()
        second = torch.autograd.grad(total, inputs, create_graph=True)
        return torch.autograd.grad(torch.stack([g.square().sum() for g in second]).sum(), inputs)

    torch.testing.assert_close(third(fast(case.call)), third(case.call), atol=1e-10, rtol=1e-9)


def test_third_derivatives_of_batch_norm_are_refused_as_by_pytorch():
    case = batch_norm((5, 2))
    inputs = case.inputs()

    def third(call: Callable[..., Tensor]) -> tuple:
        first = torch.autograd.grad(call(*inputs).tanh().sum(), inputs, create_graph=True)
        total = torch.stack([g.square().sum() for g in first]).sum()
        second = torch.autograd.grad(total, inputs, create_graph=True)
        return torch.autograd.grad(torch.stack([g.square().sum() for g in second]).sum(), inputs)

    with pytest.raises(UnsupportedError, match="no third derivative.*evaluation mode"):
        third(fast(case.call))


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "circular": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (2, 2, 5, 5)),
    "reflect": (lambda: nn.Conv1d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 2, 5)),
    "same": (lambda: nn.Conv2d(2, 3, 3, padding="same"), (2, 2, 5, 5)),
    "unbatched": (lambda: nn.Conv2d(2, 3, 3), (2, 5, 5)),
    "batch norm": (lambda: nn.BatchNorm2d(2), (3, 2, 4, 4)),
    "no affine": (lambda: nn.BatchNorm2d(2, affine=False), (3, 2, 4, 4)),
    "no running statistics": (lambda: nn.BatchNorm1d(2, track_running_stats=False), (6, 2)),
    "cumulative average": (lambda: nn.BatchNorm1d(2, momentum=None), (6, 2)),
    "evaluation": (lambda: nn.BatchNorm1d(2).eval(), (6, 2)),
    "block": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Softplus(), nn.Conv2d(4, 2, 1)
        ),
        (3, 2, 4, 4),
    ),
}


@pytest.mark.parametrize("make, shape", LAYERS.values(), ids=LAYERS)
def test_layers_and_their_running_statistics(make, shape):
    torch.manual_seed(0)
    layer = make().double()
    twin = make().double()
    twin.load_state_dict(layer.state_dict())
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)

    def run(module: nn.Module, call: Callable) -> tuple:
        inputs = [x, *module.parameters()]
        return derivatives(lambda *_: call(x), inputs)

    torch.testing.assert_close(run(layer, fast(layer)), run(twin, twin), atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(layer.state_dict(), twin.state_dict())  # each ran once


def test_running_statistics_advance_once_through_first_and_second_derivative():
    norm = nn.BatchNorm1d(2).double()
    x = torch.randn(8, 2, dtype=torch.float64)
    with FastSecondDerivatives():
        y = norm(x)
    (g,) = torch.autograd.grad(y.square().sum(), norm.weight, create_graph=True)
    g.square().sum().backward()
    assert norm.num_batches_tracked == 1
    torch.testing.assert_close(norm.running_mean, 0.1 * x.mean(0))


def test_batch_norm_of_one_value_per_channel_is_refused_as_by_pytorch():
    with pytest.raises(ValueError, match="more than 1 value per channel"), FastSecondDerivatives():
        nn.BatchNorm1d(3)(torch.ones(1, 3))


def test_unwatched_computation_and_no_grad_run_natively():
    layer, x = nn.Conv2d(1, 1, 2), torch.ones(1, 1, 3, 3)
    assert layer(x).grad_fn.name() == "ConvolutionBackward0"
    with torch.no_grad(), FastSecondDerivatives():
        assert layer(x).grad_fn is None


@pytest.mark.filterwarnings("ignore:.*vmap.*:UserWarning")
def test_convolutions_inside_vmap_run():
    x, w = torch.randn(3, 2, 1, 4, 4), torch.randn(2, 1, 3, 3)
    with FastSecondDerivatives():
        y = torch.vmap(lambda a: F.conv2d(a, w))(x)
    torch.testing.assert_close(y, torch.stack([F.conv2d(a, w) for a in x]))


@every_case
def test_on_a_device(case, device):
    inputs = case.inputs()
    there = [t.detach().to(device).requires_grad_() for t in inputs]
    for a, b in zip(derivatives_on(case, there)[2], derivatives_on(case, inputs)[2], strict=True):
        torch.testing.assert_close(a.cpu(), b, atol=1e-8, rtol=1e-8)


def derivatives_on(case: Case, inputs: list[Tensor]) -> tuple:
    y = fast(case.call)(*inputs)
    first = torch.autograd.grad(y.tanh().sum(), inputs, create_graph=True)
    total = torch.stack([g.square().sum() for g in first]).sum()
    return y, first, torch.autograd.grad(total, inputs)
